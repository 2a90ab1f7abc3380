#!/usr/bin/env bash
# What docs/backup.md says: a copy made while the daemon works is whole, and an old copy loses nothing as long as the stream
# still has the messages, and they are audited or the consumer is recreated.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

database=$work/orders.db

main() {
    apt_install sqlite3=sqlite3 curl=curl
    nats_server=$("$root/tests/tools/nats-server.sh")
    build_daemon
    nats_port=$(free_port)
    http_port=$(free_port)
    export ORDER_PROCESSOR__NATS__URL=nats://127.0.0.1:$nats_port
    export ORDER_PROCESSOR__DATABASE__URL=sqlite://$database
    export ORDER_PROCESSOR__HTTP__LISTEN=127.0.0.1:$http_port
    start_nats "$nats_port" "$work/nats"
    "$order_processor" setup --max-bytes=1GiB

    step "back up a daemon that works"
    "$order_processor" publish --count 2000 >/dev/null
    start_daemon
    eventually 30 has_rows 500 || true
    claim "order-processor backup" "$order_processor" backup "$work/backup.db"
    claim "the copy is whole" equal ok "$(sqlite3 "$work/backup.db" 'PRAGMA integrity_check')"
    claim "its orders and ids belong together" equal "$(rows "$work/backup.db" 'SELECT count(*) FROM orders')" \
        "$(rows "$work/backup.db" 'SELECT count(*) FROM processed_ids')"
    claim "all orders are processed" eventually 30 has_rows 2000
    "$order_processor" publish --count 500 --start 2001 >/dev/null
    claim "and 500 more" eventually 30 has_rows 2500
    stop_daemon

    step "restore it"
    local in_backup
    restore
    in_backup=$(rows "$database" 'SELECT count(*) FROM orders')
    claim "the copy is older" between 500 "$in_backup" 2499
    start_daemon
    claim "on its own the daemon does not notice" eventually 5 idle
    claim "and lacks orders" equal "$in_backup" "$(rows "$database" 'SELECT count(*) FROM orders')"
    stop_daemon
    claim "an audit does" fails "$order_processor" audit
    claim "and applies them" quietly "$order_processor" audit --repair
    claim "now all orders are there" has_rows 2500
    claim "each once" equal 2500 "$(rows "$database" 'SELECT count(DISTINCT stream_seq) FROM orders')"
    claim "and the next audit finds nothing" quietly "$order_processor" audit
    start_daemon
    claim "the daemon goes on" eventually 10 idle

    step "pause, work on the database, resume"
    claim "pause" "$order_processor" pause --reason VACUUM
    claim "the file is free" sqlite3 "$database" 'PRAGMA locking_mode=EXCLUSIVE; BEGIN EXCLUSIVE; COMMIT; VACUUM'
    "$order_processor" publish --count 10 --start 2501 >/dev/null
    claim "orders wait" equal 2500 "$(rows "$database" 'SELECT count(*) FROM orders')"
    claim "resume" "$order_processor" resume
    claim "and are processed" eventually 15 has_rows 2510
    stop_daemon

    step "restore it again, and recreate the consumer"
    restore
    claim "recreate the consumer at the first message" "$order_processor" setup --recreate --start-seq 1 --yes
    start_daemon
    claim "now all orders are there" eventually 30 has_rows 2510
    claim "the known ones are duplicates" eventually 10 metric_is 'outcomes_total{outcome="duplicate"}' "$in_backup"
    claim "each order once" equal 2510 "$(rows "$database" 'SELECT count(DISTINCT stream_seq) FROM orders')"
    stop_daemon

    step "stop and copy"
    claim "after a stop there is one file" equal orders.db "$(basename -a "$database"*)"
    finish
}

restore() {
    local before
    before=$(mktemp -d "$work/before-restore.XXXXXX")
    mv "$database"* "$before/"
    install -m 0600 "$work/backup.db" "$database"
}

fails() {
    ! "$@" >/dev/null 2>&1
}

quietly() {
    "$@" >"$work/quiet" 2>&1 || {
        tail -n 5 "$work/quiet" | sed 's/^/  | /'
        return 1
    }
}

start_daemon() {
    "$order_processor" run 2>"$work/daemon.log" &
    daemon=$!
    children+=("$daemon")
    eventually 20 ready || give_up "the daemon is not ready: $(tail -n 1 "$work/daemon.log")"
}

stop_daemon() {
    kill -TERM "$daemon"
    claim "it drains" wait "$daemon"
}

ready() {
    "$order_processor" healthcheck >/dev/null 2>&1
}

has_rows() {
    (($(rows "$database" 'SELECT count(*) FROM orders' 2>/dev/null || echo 0) >= $1))
}

metric_is() {
    [[ $(curl -s "http://127.0.0.1:$http_port/metrics" | awk -v name="order_processor_$1" '$1 == name {print $2}') == "$2" ]]
}

idle() {
    metric_is consumer_num_pending 0 && metric_is consumer_num_ack_pending 0
}

main "$@"
