# Sourced by scripts/install-engine: Debian and Ubuntu packages.

tool_packages=(mmdebstrap zstd git iptables iproute2 uidmap ca-certificates debian-archive-keyring ubuntu-keyring python3 python3-venv)

distribution() { (. /etc/os-release && printf '%s' "$ID"); }
codename() { (. /etc/os-release && printf '%s' "${VERSION_CODENAME:-}"); }

missing_tools() {
    local command
    for command in mmdebstrap zstd git iptables ip newuidmap docker-registry; do
        PATH=$PATH:/usr/sbin:/sbin command -v "$command" >/dev/null || printf '%s ' "$command"
    done
    python3 -c 'import ensurepip, venv' 2>/dev/null || printf 'python3-venv '
    for command in debian ubuntu; do
        [[ -s /usr/share/keyrings/$command-archive-keyring.gpg ]] || printf '%s-archive-keyring ' "$command"
    done
}

# The archive that this machine takes its own release from: a company mirror stays the one in use.
own_archive() {
    local url release own
    own=$(codename)
    # --no-release-info: or apt leaves out what it has not fetched yet. The $(…) are apt's fields, not the shell's.
    # shellcheck disable=SC2016
    apt-get indextargets --no-release-info --format '$(REPO_URI) $(RELEASE)' 'Created-By: Packages' |
        while read -r url release; do
            [[ $release != "$own" ]] || printf '%s\n' "$url"
        done | sed -n 1p
}

# Everything below runs with package sources, lists and pins separate from the machine's, so that those stay as they were.
apt_folder=""
apt_prepare() {
    [[ -z $apt_folder ]] || return 0
    local archive keyring=/usr/share/keyrings/debian-archive-keyring.gpg
    apt_folder=$(mktemp -d)
    trap 'rm -rf "$apt_folder"' EXIT
    chmod 755 "$apt_folder"
    mkdir -p "$apt_folder"/{sources,preferences,lists/partial}
    cp /etc/apt/sources.list.d/*.{list,sources} "$apt_folder/sources/" 2>/dev/null || true
    cp /etc/apt/preferences.d/* "$apt_folder/preferences/" 2>/dev/null || true
    if [[ $(distribution) == debian ]]; then
        archive=$(own_archive)
        [[ -n $archive ]] || die 8 "no package source for Debian $(codename) in /etc/apt: add one, then run this again"
        say "taking the engine from sid on $archive"
        cat >"$apt_folder/sources/envbuild-sid.sources" <<SOURCE
Types: deb
URIs: $archive
Suites: sid
Components: main
Signed-By: $keyring
Check-Valid-Until: no
SOURCE
        # 90 is below every installed version: a package comes from sid only where it is asked for as PACKAGE/sid, or nothing
        # else satisfies what that one needs.
        printf 'Package: *\nPin: release n=sid\nPin-Priority: 90\n' >"$apt_folder/preferences/envbuild-sid"
    fi
    isolated_apt update -qq || die 8 "apt-get update failed: see the lines above for the host that it could not reach"
}

isolated_apt() {
    DEBIAN_FRONTEND=noninteractive apt-get \
        -o Dir::Etc::SourceParts="$apt_folder/sources" \
        -o Dir::Etc::PreferencesParts="$apt_folder/preferences" \
        -o Dir::State::Lists="$apt_folder/lists" \
        -o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache= \
        -o Acquire::Retries=3 -o Dpkg::Use-Pty=0 -o Dpkg::Progress-Fancy=0 \
        "$@" >&2
}

packages_install_python() {
    command -v python3 >/dev/null && return
    apt_prepare
    isolated_apt install -y -qq --no-install-recommends python3
}

packages_install() {
    local package engine=() wanted=() had_registry=yes
    command -v docker-registry >/dev/null || had_registry=no
    case $(distribution) in
        # Ubuntu's docker.io holds the client too.
        debian) engine=(docker.io docker-cli docker-buildx containerd) ;;
        ubuntu) engine=(docker.io docker-buildx containerd) ;;
        *) die 8 "this script knows Debian and Ubuntu, not $(distribution): install Docker 28 or later with buildx by hand" ;;
    esac
    apt_prepare
    # An engine that answers is left alone: a new package would stop what it is running.
    if ! engine_answers || ! docker buildx version >/dev/null 2>&1; then
        wanted+=("${engine[@]}")
    fi
    [[ $had_registry == yes ]] || wanted+=(docker-registry)
    [[ $(distribution) == ubuntu ]] || wanted=("${wanted[@]/%//sid}")
    for package in "${tool_packages[@]}"; do
        # What is there stays at its version: this script is no upgrade.
        [[ $(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null) == installed ]] || wanted+=("$package")
    done
    say "installing ${wanted[*]}"
    isolated_apt install -y -qq --no-install-recommends "${wanted[@]}" ||
        die 8 "apt-get install failed: see the lines above"
    # The package would keep a registry open on port 5000 for everybody; envbuild starts its own on loopback when asked.
    if [[ $had_registry == no && -d /run/systemd/system ]]; then
        systemctl disable --quiet --now docker-registry 2>/dev/null || true
    fi
}
