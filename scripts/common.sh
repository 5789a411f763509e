# Sourced by the other scripts: headings, and the system's packages. $scope goes before a heading.

step() {
    printf '\n== %s%s (%d min %02d s)\n' "${scope:-}" "$1" $((SECONDS / 60)) $((SECONDS % 60))
}

as_root() {
    if [ "$(id -u)" -eq 0 ]; then
        "$@"
    elif command -v sudo >/dev/null; then
        sudo "$@"
    else
        echo "This needs root, and there is no sudo: $*" >&2
        return 1
    fi
}

# need WHAT PACKAGE...: installs packages that provide WHAT, or says what to install.
need() {
    local what=$1
    shift
    if command -v apt-get >/dev/null; then
        step "installing $what: $*"
        as_root apt-get update -qq
        as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
    else
        echo "Missing: $what. On Debian it is in: $*. Install your system's equivalent and run this again." >&2
        exit 1
    fi
}

need_node() {
    command -v node >/dev/null && command -v npm >/dev/null || need "node and npm" nodejs npm
}
