# Sourced by scripts/install-engine: a second engine, with its own containerd, store, socket and bridge.
#
# Two daemons in one network namespace share iptables' DOCKER chains, and each flushes them when it starts. So the second one
# writes no rules at all (iptables: false) and has a bridge that is made here, with the two rules its containers need.

second_home=/var/lib/envbuild-engine

second_start() {
    local name=$1
    local home=$second_home/$name run=/run/envbuild-engine/$name bridge=eb-$name net
    local socket=unix://$run/docker.sock
    if docker -H "$socket" info >/dev/null 2>&1; then
        say "engine $name answers already"
        printf '%s\n' "$socket"
        return
    fi
    command -v dockerd >/dev/null || die 8 "dockerd is missing: run scripts/install-engine first"
    second_clear "$name" # what an engine that was killed left behind
    net=$(free_network) || die 8 "no free private network of 10.200.0.0/16 to 10.249.0.0/16 for the bridge of engine $name"
    mkdir -p "$home" "$run"

    ip link add "$bridge" type bridge
    ip addr add "$net.0.1/20" dev "$bridge"
    ip link set "$bridge" up
    printf 1 >/proc/sys/net/ipv4/ip_forward
    printf '%s' "$net" >"$home/network"
    second_rules "$name" "$net" -I

    cat >"$home/containerd.toml" <<CONFIG
version = 2
root = "$home/containerd"
state = "$run/containerd"
disabled_plugins = ["io.containerd.grpc.v1.cri", "io.containerd.cri.v1.images", "io.containerd.cri.v1.runtime"]
[grpc]
  address = "$run/containerd.sock"
CONFIG
    cat >"$home/daemon.json" <<CONFIG
{
  "hosts": ["$socket"],
  "containerd": "$run/containerd.sock",
  "data-root": "$home/docker",
  "exec-root": "$run/docker",
  "pidfile": "$run/docker.pid",
  "bridge": "$bridge",
  "default-address-pools": [{"base": "$net.128.0/17", "size": 24}],
  "iptables": false,
  "ip6tables": false,
  "features": {"containerd-snapshotter": true}
}
CONFIG
    setsid nohup containerd --config "$home/containerd.toml" >"$home/containerd.log" 2>&1 </dev/null &
    printf '%s' "$!" >"$run/containerd.pid"
    wait_for 30 test -S "$run/containerd.sock" || die 8 "containerd of engine $name does not answer: see $home/containerd.log"
    setsid nohup dockerd --config-file "$home/daemon.json" >"$home/dockerd.log" 2>&1 </dev/null &
    wait_for 60 docker -H "$socket" info || {
        tail -n 10 "$home/dockerd.log" >&2
        die 8 "engine $name does not answer after 60 s: see $home/dockerd.log"
    }
    first_engine_unharmed || die 8 "the first engine's bridge or rules are gone: restart it, and report this"
    say "engine $name on $socket, log in $home/dockerd.log"
    printf '%s\n' "$socket"
}

second_stop() {
    local name=$1
    [[ -d $second_home/$name ]] || ip link show "eb-$name" >/dev/null 2>&1 || die 8 "no engine of ours is named $name"
    second_clear "$name"
    say "engine $name stopped, its images and caches deleted"
}

second_clear() {
    local name=$1 mount net
    local home=$second_home/$name run=/run/envbuild-engine/$name
    stop_pid "$run/docker.pid" 30
    stop_pid "$run/containerd.pid" 15
    net=$(second_network "$name")
    [[ -z $net ]] || second_rules "$name" "$net" -D
    ip link delete "eb-$name" 2>/dev/null || true
    # Mounts first, the newest first, or the delete would reach into them.
    while read -r _ mount _; do
        if [[ $mount == "$home"/* || $mount == "$run"/* ]]; then printf '%s\n' "$mount"; fi
    done </proc/mounts | tac | while read -r mount; do umount -l "$mount" || true; done
    rm -rf --one-file-system "$home" "$run"
}

# The 10.N of an engine, by its bridge when its folder is gone; nothing when it has neither.
second_network() {
    local home=$second_home/$1
    if [[ -s $home/network ]]; then
        cat "$home/network"
    else
        ip -4 -oneline addr show dev "eb-$1" 2>/dev/null | sed -nE 's/.* inet (10\.[0-9]+)\..*/\1/p' || true
    fi
}

# second_rules NAME NET -I|-D: lets the bridge's containers out, and answers back in.
second_rules() {
    local bridge=eb-$1 net=$2 action=$3
    iptables -w -t nat "$action" POSTROUTING -s "$net.0.0/16" ! -o "$bridge" -j MASQUERADE || [[ $action == -D ]]
    iptables -w "$action" FORWARD -i "$bridge" -j ACCEPT || [[ $action == -D ]]
    iptables -w "$action" FORWARD -o "$bridge" -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT || [[ $action == -D ]]
}

# The first 10.N that no route of this machine is within; a wider one (a VPN's 10.0.0.0/8) yields to the bridge's own.
free_network() {
    local second routes
    # Read whole, once: `ip | grep -q` ends in SIGPIPE now and then, which pipefail takes for "no such route".
    routes=$(ip -4 route show) || return
    for second in {200..249}; do
        if ! grep -qE "^(blackhole |unreachable )?10\.$second\." <<<"$routes" &&
            ! grep -qsx "10.$second" "$second_home"/*/network; then
            printf '10.%s' "$second"
            return 0
        fi
    done
    return 1
}

# True when there is no first engine, too.
first_engine_unharmed() {
    engine_answers || return 0
    local bridge
    bridge=$(docker network inspect bridge --format '{{index .Options "com.docker.network.bridge.name"}}' 2>/dev/null) || return 0
    [[ -z $bridge ]] || ip link show "$bridge" >/dev/null 2>&1
}
