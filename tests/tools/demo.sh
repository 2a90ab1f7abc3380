#!/usr/bin/env bash
# Plays the story with the real binary and a real server: publish 5, process them, stop, publish 5 more, start again, and
# find ack floor 10 and ten orders. Fails loudly if any number is wrong. Leaves nothing behind.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/demo-common.sh"

main() {
    prepare
    step "create the stream ORDERS and its pull consumer order-processor"
    # No more than a small disk has: the server promises all of it.
    product setup --max-bytes 1GiB
    step "publish 5 orders"
    product publish --count 5
    expect "messages in the stream" 5 "$(status stream.last_seq)"

    step "run the daemon: it processes the 5"
    start_daemon
    wait_for processed_ids 5
    step "stop the daemon with SIGTERM: it drains"
    stop_daemon

    step "publish 5 more while the daemon is stopped"
    product publish --count 5
    expect "processed before the restart" 5 "$(status processed_ids)"
    expect "pending before the restart" 5 "$(status num_pending)"

    step "run the daemon again: it resumes at the ack floor"
    start_daemon
    wait_for processed_ids 10
    wait_for ack_floor.stream_seq 10
    step "show the status"
    product status
    step "stop the daemon"
    stop_daemon

    expect "ack floor" 10 "$(status ack_floor.stream_seq)"
    expect "pending" 0 "$(status num_pending)"
    expect "awaiting acknowledgement" 0 "$(status num_ack_pending)"
    expect "redelivered" 0 "$(status num_redelivered)"
    expect "processed ids" 10 "$(status processed_ids)"
    expect "dead letters" 0 "$(status dead_letters)"
    expect "rows in orders" 10 "$(rows 'SELECT count(*) FROM orders')"
    expect "different orders" 10 "$(rows 'SELECT count(DISTINCT stream_seq) FROM orders')"
    step "done: 10 orders published, 10 rows in the database, ack floor 10"
}

main
