# A user whom the image does not know may have no home to write to and no name; caches below the home need both.
if [ "$(id -u)" -ne 0 ]; then
    if [ ! -w "${HOME:-/}" ]; then
        HOME=$(mktemp -d 2>/dev/null || mktemp -d /dev/shm/home.XXXXXX)
        export HOME
    fi
    if ! id -un >/dev/null 2>&1; then export USER="${USER:-envbuild}" LOGNAME="${LOGNAME:-envbuild}"; fi
fi
