#!/usr/bin/env bash
# Plays calls of one's own service: an endpoint in Python that stores each order under its key, five orders, then five while the
# endpoint is down. Fails loudly if any number is wrong. Leaves nothing behind.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/demo-common.sh"

endpoint_pid=

main() {
    prepare
    local port
    port=$(free_port $((30000 + RANDOM % 10000)))
    step "start the endpoint examples/endpoints/shop.py, and write a handler file that calls it"
    start_endpoint "$port"
    product handler init http "$work/shop"
    sed -i "s|127.0.0.1:8080|127.0.0.1:$port|" "$work/shop/handler.toml"
    product handler check "$work/shop/handler.toml"
    product handler try "$work/shop/handler.toml" --subject ORDERS.new --payload "$work/shop/order.json"
    export ORDER_PROCESSOR__HANDLER__FILE=$work/shop/handler.toml

    step "publish five orders and run the daemon: the endpoint has them"
    product setup --max-bytes 1GiB
    for cents in 100 200 300 400 500; do
        echo "{\"customer\": \"ada\", \"cents\": $cents}"
    done >"$work/orders.ndjson"
    product publish "$work/orders.ndjson" --id-prefix first
    start_daemon
    wait_for processed_ids 5
    expect "orders of the endpoint" 5 "$(rows 'SELECT count(*) FROM sales' "$work/shop.db")"

    step "stop the endpoint and publish five others: they wait, and no attempt is counted"
    stop "$endpoint_pid"
    endpoint_pid=
    product publish "$work/orders.ndjson" --id-prefix second
    local deadline=$((SECONDS + patience_s)) said
    until said=$("$order_processor" healthcheck 2>&1) || [[ $said == *"is away"* ]]; do
        ((SECONDS < deadline)) || fail "the daemon does not name the host: $said"
        sleep 0.1
    done
    echo "$said"
    expect "rows in attempts" 0 "$(rows 'SELECT count(*) FROM attempts')"

    step "start the endpoint again: the daemon goes on by itself"
    start_endpoint "$port"
    wait_for processed_ids 10
    wait_for dead_letters 0
    expect "orders of the endpoint" 10 "$(rows 'SELECT count(*) FROM sales' "$work/shop.db")"
    stop_daemon
    step "done: ten orders published, ten orders in the database of the endpoint"
}

start_endpoint() {
    python3 "$root/examples/endpoints/shop.py" "$1" "$work/shop.db" &
    endpoint_pid=$!
    local deadline=$((SECONDS + patience_s))
    until (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; do
        kill -0 "$endpoint_pid" 2>/dev/null || fail "the endpoint ended"
        ((SECONDS < deadline)) || fail "the endpoint does not listen"
        sleep 0.1
    done
}

main
