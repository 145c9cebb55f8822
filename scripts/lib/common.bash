# Sourced by scripts/install-engine and scripts/ci/prepare-runner: messages, root, waiting.

say() { printf '%s: %s\n' "${0##*/}" "$*" >&2; }

# die CODE MESSAGE...
die() {
    local code=$1
    shift
    printf '%s: error: %s\n' "${0##*/}" "$*" >&2
    exit "$code"
}

# Starts this script again as root when it is not, or says why it cannot.
need_root() {
    ((EUID == 0)) && return
    command -v sudo >/dev/null || die 8 "this needs root, and there is no sudo: run it as root"
    say "this needs root: going on with sudo"
    exec sudo -- "$0" "$@"
}

# A name becomes part of folder, socket and interface names; Linux allows an interface 15 characters.
check_name() {
    [[ $1 =~ ^[a-z][a-z0-9-]{0,8}$ ]] || die 2 "an engine's name is 1 to 9 of a-z, 0-9 and '-', starting with a letter: $1"
}

check_port() {
    if ! [[ $1 =~ ^[1-9][0-9]{3,4}$ ]] || (($1 < 1024 || $1 > 65535)); then
        die 2 "a port is a number from 1024 to 65535: $1"
    fi
}

# wait_for SECONDS COMMAND...: true as soon as the command succeeds, false when the time is over.
wait_for() {
    local end=$((SECONDS + $1))
    shift
    until "$@" >/dev/null 2>&1; do
        ((SECONDS < end)) || return 1
        sleep 0.2
    done
}

# stop_pid FILE SECONDS: asks the process in the pid file to end, waits, and only then makes it.
stop_pid() {
    local file=$1 seconds=$2 pid
    [[ -s $file ]] || return 0
    pid=$(<"$file")
    if kill -TERM "$pid" 2>/dev/null && ! wait_for "$seconds" process_gone "$pid"; then
        kill -KILL "$pid" 2>/dev/null || true
        wait_for 5 process_gone "$pid" || true
    fi
    rm -f "$file"
}

process_gone() { ! kill -0 "$1" 2>/dev/null; }
