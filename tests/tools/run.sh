#!/usr/bin/env bash
# `make run`: a server, the stream and consumer, and the daemon in the foreground, all on loopback. Data stays in
# .tools/run/<port of the server>/ until `make clean`, so that two of these at once share nothing. Ctrl-C drains the daemon,
# then stops the server; a second Ctrl-C does not wait for the drain.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

server_pid=
daemon_pid=

main() {
    nats_server=$("$tools/nats-server.sh")
    build

    local port http_port
    port=$(free_port 4222)
    [[ $port == 4222 ]] || echo "port 4222 is taken; the server takes $port"
    http_port=$(free_port 9464)
    [[ $http_port == 9464 ]] || echo "port 9464 is taken; the daemon's HTTP takes $http_port"

    local data=$root/.tools/run/$port
    start_server "$port" "$data" || fail "the server did not start: $server_error"
    export ORDER_PROCESSOR__NATS__URL=$url
    export ORDER_PROCESSOR__DATABASE__URL=sqlite://$data/orders.db
    export ORDER_PROCESSOR__HTTP__LISTEN=127.0.0.1:$http_port
    "$order_processor" setup || fail "setup ended with exit code $?"

    cat <<HINT

In a second terminal:
  ORDER_PROCESSOR__NATS__URL=$url $order_processor publish --count 5
  ORDER_PROCESSOR__NATS__URL=$url ORDER_PROCESSOR__DATABASE__URL=$ORDER_PROCESSOR__DATABASE__URL ORDER_PROCESSOR__HTTP__LISTEN=$ORDER_PROCESSOR__HTTP__LISTEN $order_processor status
  curl http://127.0.0.1:$http_port/metrics
Ctrl-C stops.

HINT

    # A process group of its own: the terminal's Ctrl-C reaches it once, through the trap, and not twice.
    set -m
    "$order_processor" run &
    daemon_pid=$!
    set +m
    local signalled exit_code
    trap 'signalled=yes; kill -TERM "$daemon_pid" 2>/dev/null || true' INT TERM HUP
    # A signal ends `wait` before the daemon has ended, and with a code that is not the daemon's.
    signalled=yes
    while [[ $signalled == yes ]]; do
        signalled=no
        exit_code=0
        wait "$daemon_pid" || exit_code=$?
    done
    daemon_pid=
    exit "$exit_code"
}

fail() {
    echo "run.sh: $*" >&2
    exit 1
}

clean_up() {
    trap '' INT TERM HUP
    [[ -z $daemon_pid ]] || stop "$daemon_pid"
    [[ -z $server_pid ]] || stop "$server_pid"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

main
