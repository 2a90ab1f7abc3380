#!/usr/bin/env bash
# Plays an effect of one's own in SQL: a handler file with routes and tables, five good orders and a bad one, twice, with kill -9
# in between. Fails loudly if any number is wrong. Leaves nothing behind.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/demo-common.sh"

main() {
    prepare
    step "write an example of a handler file, check it and try it"
    product handler init sql "$work/shop"
    product handler check "$work/shop/handler.toml"
    product handler try "$work/shop/handler.toml" --subject ORDERS.new --payload "$work/shop/order.json"
    export ORDER_PROCESSOR__HANDLER__FILE=$work/shop/handler.toml

    step "publish five orders, and one without a price"
    product setup --max-bytes 1GiB
    for cents in 100 200 300 400 500; do
        echo "{\"sku\": \"apple\", \"total_cents\": $cents}"
    done >"$work/orders.ndjson"
    echo '{"sku": "pear"}' >>"$work/orders.ndjson"
    product publish "$work/orders.ndjson" --id-prefix first

    step "run the daemon: the orders are in the tables of the shop, the bad one is a dead letter"
    start_daemon
    wait_for processed_ids 5
    wait_for dead_letters 1
    expect "rows in sales" 5 "$(rows 'SELECT count(*) FROM sales')"
    expect "orders of apples" 5 "$(rows 'SELECT orders FROM sold')"
    expect "sum of sales" 1500 "$(rows 'SELECT sum(cents) FROM sales')"

    step "kill the daemon, publish the same orders again and five others, and start it again"
    stop "$daemon_pid" KILL
    daemon_pid=
    product publish "$work/orders.ndjson" --id-prefix first
    product publish "$work/orders.ndjson" --id-prefix second
    start_daemon
    wait_for processed_ids 10
    wait_for dead_letters 2
    stop_daemon
    expect "rows in sales" 10 "$(rows 'SELECT count(*) FROM sales')"
    expect "orders of apples" 10 "$(rows 'SELECT orders FROM sold')"
    product dead-letters list
    step "done: ten good orders published, ten rows in sales, each order once"
}

main
