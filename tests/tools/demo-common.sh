# What the demos share: the daemon, checks of what it says, and the end. Sourced by bash, not run. Sets $work and $nats_server, and
# builds the binary.

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

patience_s=60 # only a bound: every wait ends as soon as its condition holds
server_pid=
daemon_pid=
work=$(mktemp -d)

# Builds, starts a server, and makes the settings those of this demo.
prepare() {
    nats_server=$("$tools/nats-server.sh")
    step "build the daemon (the first build takes some minutes)"
    build

    step "start $("$nats_server" --version) with JetStream and file storage"
    start_server -1 "$work/nats" || fail "the server did not start: $server_error"
    export ORDER_PROCESSOR__NATS__URL=$url
    export ORDER_PROCESSOR__DATABASE__URL=sqlite://$work/orders.db
    export ORDER_PROCESSOR__HTTP__LISTEN=127.0.0.1:$(free_port $((20000 + RANDOM % 10000)))
    export ORDER_PROCESSOR__LOG__FORMAT=text
    echo "listening on $url"
}

start_daemon() {
    echo "\$ order-processor run"
    "$order_processor" run 2>&1 &
    daemon_pid=$!
    local deadline=$((SECONDS + patience_s))
    until "$order_processor" healthcheck >/dev/null 2>&1; do
        kill -0 "$daemon_pid" 2>/dev/null || fail "the daemon ended before it was ready"
        ((SECONDS < deadline)) || fail "the daemon is not ready after $patience_s s: $("$order_processor" healthcheck 2>&1 || true)"
        sleep 0.1
    done
}

stop_daemon() {
    stop "$daemon_pid"
    daemon_pid=
    expect "exit code after SIGTERM" 0 "$exit_code"
}

# wait_for FIELD VALUE: until `status --json` says so.
wait_for() {
    local deadline=$((SECONDS + patience_s)) seen
    until seen=$(status "$1") && [[ $seen == "$2" ]]; do
        ((SECONDS < deadline)) || expect "$1 after $patience_s s" "$2" "$seen"
        sleep 0.1
    done
    expect "$1" "$2" "$seen"
}

# status FIELD: one number out of `status --json`, such as ack_floor.stream_seq.
status() {
    "$order_processor" status --json | python3 -c '
import functools, json, sys
print(functools.reduce(lambda value, key: value[key], sys.argv[1].split("."), json.load(sys.stdin)))' "$1"
}

# rows SQL [FILE]: asks the database file itself, not the product.
rows() {
    python3 -c 'import sqlite3, sys; print(sqlite3.connect(sys.argv[1]).execute(sys.argv[2]).fetchone()[0])' "${2:-$work/orders.db}" "$1"
}

product() {
    echo "\$ order-processor $*"
    "$order_processor" "$@" || fail "order-processor $* ended with exit code $?"
}

step() {
    printf '\n== %s\n' "$*"
}

expect() {
    if [[ $3 != "$2" ]]; then
        fail "$1: expected $2, found $3"
    fi
    echo "ok: $1 = $2"
}

fail() {
    printf '\nDEMO FAILED: %s\n' "$*" >&2
    exit 1
}

clean_up() {
    [[ -z $daemon_pid ]] || stop "$daemon_pid" KILL
    [[ -z ${endpoint_pid:-} ]] || stop "$endpoint_pid" KILL
    [[ -z $server_pid ]] || stop "$server_pid"
    rm -rf "$work"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
