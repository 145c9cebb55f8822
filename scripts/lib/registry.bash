# Sourced by scripts/install-engine: a registry on loopback.

registry_home=${XDG_STATE_HOME:-$HOME/.local/state}/envbuild

registry_answers() { (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }

# registry_start PORT [DATA]
registry_start() {
    local port=$1 folder=$registry_home/registry-$1
    local data=${2:-$folder/data}
    command -v docker-registry >/dev/null || die 8 "docker-registry is missing: run scripts/install-engine first"
    registry_answers "$port" && die 8 "something listens on 127.0.0.1:$port already: choose another port, or --stop-registry $port"
    mkdir -p "$folder" "$data"
    data=$(cd "$data" && pwd)
    cat >"$folder/config.yml" <<CONFIG
version: 0.1
log: {level: warn}
storage:
  filesystem: {rootdirectory: $data}
  delete: {enabled: true}
http: {addr: "127.0.0.1:$port"}
CONFIG
    setsid nohup docker-registry serve "$folder/config.yml" >"$folder/log" 2>&1 </dev/null &
    printf '%s' "$!" >"$folder/pid"
    wait_for 15 registry_answers "$port" || {
        tail -n 5 "$folder/log" >&2
        die 8 "docker-registry did not start: see $folder/log"
    }
    say "registry on 127.0.0.1:$port, data in $data, log in $folder/log"
    printf '127.0.0.1:%s\n' "$port"
}

registry_stop() {
    local folder=$registry_home/registry-$1
    [[ -s $folder/pid ]] || die 8 "no registry of ours on port $1"
    stop_pid "$folder/pid" 10
    say "registry on 127.0.0.1:$1 stopped"
}
