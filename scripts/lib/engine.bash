# Sourced by scripts/install-engine: the engine's settings, start and facts.

engine_log=/var/log/envbuild-dockerd.log

engine_answers() { docker info >/dev/null 2>&1; }

everything_there() {
    command -v docker >/dev/null && engine_answers && docker buildx version >/dev/null 2>&1 && [[ -z $(missing_tools) ]]
}

# The containerd image store is what lets the default builder export and import caches and keep OCI digests. BuildKit's own
# garbage collection caps cache mounts near 3 GiB and would throw a compiler cache away, so layers go first, and only when
# the disk is nearly full.
# engine_settings [FILE]
engine_settings() {
    python3 - "${1:-/etc/docker/daemon.json}" <<'PYTHON'
import json
import pathlib
import sys

path = pathlib.Path(sys.argv[1])
needed = {"features": {"containerd-snapshotter": True}}
default = {
    "builder": {
        "gc": {
            "enabled": True,
            "policy": [
                {"filter": ["type=regular"], "maxUsedSpace": "500GB", "minFreeSpace": "6GB", "reservedSpace": "2GB"},
                {"all": True, "maxUsedSpace": "500GB", "minFreeSpace": "3GB", "reservedSpace": "2GB"},
            ],
        }
    }
}
try:
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    settings = json.loads(before or "{}")
    if not isinstance(settings, dict):
        raise ValueError("it holds no JSON object")
except ValueError as error:
    sys.exit(f"install-engine: error: {path} cannot be read ({error}): fix it, then run this again")
features = settings.setdefault("features", {})
if features.get("containerd-snapshotter", True) is not True:
    sys.exit(
        f"install-engine: error: {path} turns features.containerd-snapshotter off, and envbuild needs the containerd image "
        "store: turn it on (images of the old store will not show until it is off again), then run this again"
    )
features |= needed["features"]
if "gc" not in settings.get("builder", {}):
    settings.setdefault("builder", {}).update(default["builder"])
else:
    print(f"install-engine: keeping builder.gc of {path} as it is", file=sys.stderr)
after = json.dumps(settings, indent=2) + "\n"
if json.loads(before or "{}") != settings:
    path.parent.mkdir(parents=True, exist_ok=True)
    if before:
        path.with_name("daemon.json.before-envbuild").write_text(before, encoding="utf-8")
    path.write_text(after, encoding="utf-8")
    print(f"install-engine: wrote {path}", file=sys.stderr)
PYTHON
}

engine_start() {
    if engine_answers; then
        return
    fi
    if [[ -d /run/systemd/system ]]; then
        say "starting docker.service (log: journalctl -u docker)"
        systemctl enable --quiet --now docker
        wait_for 60 engine_answers || die 8 "docker.service does not answer: see journalctl -u docker"
        return
    fi
    say "no systemd here: starting dockerd in the background (log: $engine_log)"
    setsid nohup dockerd --pidfile /run/docker.pid >"$engine_log" 2>&1 </dev/null &
    wait_for 60 engine_answers || {
        tail -n 15 "$engine_log" >&2
        die 8 "dockerd does not answer after 60 s: its last lines are above, all of them in $engine_log"
    }
}

engine_facts() {
    local server driver
    server=$(docker version --format '{{.Server.Version}}')
    driver=$(docker info --format '{{.Driver}} {{.DriverStatus}}')
    say "engine $server, $(docker buildx version | cut -d' ' -f2), image store: $driver"
    ((${server%%.*} >= 28)) || die 8 "the engine is $server and envbuild needs 28 or later: install a newer Docker by hand"
    [[ $driver == *io.containerd.snapshotter* ]] ||
        die 8 "the engine runs without the containerd image store: set features.containerd-snapshotter in /etc/docker/daemon.json and restart it"
    if ((EUID == 0)) && [[ -n ${SUDO_USER:-} ]] && ! grep -qw docker <<<"$(id -nG "$SUDO_USER")"; then
        say "to use it without sudo: sudo usermod -aG docker $SUDO_USER, then log in again"
    fi
}
