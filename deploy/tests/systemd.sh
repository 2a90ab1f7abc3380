#!/usr/bin/env bash
# The package and the unit under a real systemd: a Debian booted with systemd-nspawn, which shares this machine's loopback.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

unit=order-processor.service
# More than can be through before somebody says stop.
[[ $profile == dev ]] && orders=20000 || orders=100000
guest=$work/guest
leader=

main() {
    require_root
    apt_install systemd-nspawn=systemd-container nsenter=util-linux curl=curl prometheus-node-exporter=prometheus-node-exporter
    nats_server=$("$root/tests/tools/nats-server.sh")
    build_daemon
    make_debian
    build_package
    lint_units
    boot
    nats_port=$(free_port)
    http_port=$(free_port)
    start_nats "$nats_port" "$work/nats"

    install_package
    start_and_stop
    stop_in_a_backlog
    kill_in_a_backlog
    audit
    watchdog
    bad_settings
    server_away
    log_in
    upgrade_and_remove
    finish
}

build_package() {
    step "build the package"
    if ! [[ -x $kept/cargo-deb/bin/cargo-deb ]]; then
        # Without xz, which takes longest to build and to run.
        CARGO_PROFILE_DEV_DEBUG=0 cargo install --debug --locked --quiet --no-default-features --features gzip \
            --root "$kept/cargo-deb" --target-dir "$kept/cargo-deb-target" cargo-deb@3.8.0
        rm -rf "$kept/cargo-deb-target"
    fi
    # The binary of the tests where cargo-deb looks for that of `make deb`, which takes long to build.
    mkdir -p "$work/target/release"
    cp "$order_processor" "$work/target/release/"
    "$root/deploy/debian/documents.sh" "$work/target/release/order-processor"
    (cd "$root" && CARGO_TARGET_DIR=$work/target "$kept/cargo-deb/bin/cargo-deb" --no-build --fast --output "$work/order-processor.deb" >/dev/null)
    claim "the package has binary, manual, completions, unit, settings, user and docs, and nothing more" equal "$(
        (cd "$root" && find docs -name '*.md' -o -name path.svg) | sed 's#^#./usr/share/doc/order-processor/#' | sort - <(
            cat <<'LIST'
./etc/order-processor/config.toml
./etc/order-processor/credentials/README
./usr/bin/order-processor
./usr/lib/systemd/system/order-processor-audit.service
./usr/lib/systemd/system/order-processor-audit.timer
./usr/lib/systemd/system/order-processor.service
./usr/lib/sysusers.d/order-processor.conf
./usr/share/bash-completion/completions/order-processor
./usr/share/doc/order-processor/CHANGELOG.md
./usr/share/doc/order-processor/README.md
./usr/share/doc/order-processor/benches/README.md
./usr/share/doc/order-processor/copyright
./usr/share/doc/order-processor/default.toml
./usr/share/doc/order-processor/tests/README.md
./usr/share/fish/vendor_completions.d/order-processor.fish
./usr/share/man/man1/order-processor.1
./usr/share/zsh/vendor-completions/_order-processor
LIST
        )
    )" "$(dpkg-deb --fsys-tarfile "$work/order-processor.deb" | tar -t | grep -v '/$' | sort)"
    claim "an upgrade asks before it replaces the settings" grep -qx /etc/order-processor/config.toml \
        <(dpkg-deb --info "$work/order-processor.deb" conffiles)
}

lint_units() {
    step "lint the units"
    local name
    mkdir -p "$work/lint"
    for name in order-processor.service order-processor-audit.service order-processor-audit.timer; do
        # The binary has to exist for `verify`, and so has a folder for systemd-analyze that is not this machine's own.
        sed "s#/usr/bin/order-processor#/bin/true#" "$root/deploy/systemd/$name" >"$work/lint/$name"
    done
    for name in order-processor.service order-processor-audit.service order-processor-audit.timer; do
        claim "systemd-analyze verify finds nothing in $name" \
            quietly systemd-analyze verify --recursive-errors=yes --man=no "$work/lint/$name"
        [[ $name == *.service ]] || continue
        claim "systemd-analyze security: exposure at most 1.5" \
            quietly systemd-analyze security --offline=true --no-pager --threshold=15 "$work/lint/$name"
        tail -n 1 "$work/quiet"
    done
}

boot() {
    step "boot"
    mkdir "$guest"
    tar -C "$guest" -xpf "$debian"
    echo order-processor-test >"$guest/etc/hostname"
    # Nothing of it is needed, and the network is the host's.
    chroot "$guest" systemctl --quiet mask systemd-networkd.service systemd-resolved.service systemd-timesyncd.service \
        getty.target console-getty.service
    cp "$work/order-processor.deb" "$guest/root/"
    systemd-nspawn --register=no --keep-unit --directory="$guest" --boot --quiet --console=read-only \
        </dev/null >"$work/console" 2>&1 &
    nspawn=$!
    eventually 5 has_leader || leave_out "systemd-nspawn does not start here: $(tail -n 1 "$work/console")"
    eventually 30 booted || leave_out "systemd does not come up as process 1 here: $(tail -n 1 "$work/console")"
}

has_leader() {
    leader=$(cat "/proc/$nspawn/task/$nspawn/children" 2>/dev/null) && leader=${leader%% *} && [[ -n $leader ]]
}

booted() {
    [[ $(in_guest systemctl is-system-running 2>/dev/null) == @(running|degraded) ]]
}

healthy() {
    product healthcheck >/dev/null 2>&1
}

in_guest() {
    nsenter --target "$leader" --all -- /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C.UTF-8 "$@"
}

# The operator's commands, as the daemon's user and with its settings.
product() {
    in_guest runuser -u order-processor -- order-processor "$@"
}

evidence() {
    in_guest systemctl --no-pager status "$unit" 2>&1 | sed 's/^/  | /' | tail -n 25
}

property() {
    in_guest systemctl show --property "$1" --value "$unit"
}

is() {
    [[ $(property "$1") == "$2" ]]
}

processed() {
    rows "$guest/var/lib/order-processor/orders.db" 'SELECT count(*) FROM orders'
}

processed_more_than() {
    (($(processed 2>/dev/null || echo 0) > $1))
}

processed_exactly() {
    (($(processed 2>/dev/null || echo 0) == $1))
}

metric() {
    curl -s "http://127.0.0.1:$http_port/metrics" | awk -v name="order_processor_$1" '$1 == name {print $2}'
}

journal() {
    in_guest journalctl --unit "$unit" --output cat --no-pager "$@"
}

settings() {
    cat >"$guest/etc/order-processor/config.toml" <<TOML
[nats]
url = "nats://127.0.0.1:$nats_port"
[database]
url = "sqlite:///var/lib/order-processor/orders.db"
[http]
listen = "127.0.0.1:$http_port"
[batch]
max_messages = 20
TOML
}

install_package() {
    step "install the package"
    claim "apt-get install takes it" quietly in_guest apt-get install -qq -y /root/order-processor.deb
    claim "the unit is enabled" equal enabled "$(in_guest systemctl is-enabled "$unit")"
    claim "it is not started before the operator says so" equal inactive "$(property ActiveState)"
    claim "the user exists, without a login" equal /usr/sbin/nologin "$(in_guest getent passwd order-processor | cut -d: -f7)"
    settings
    claim "setup creates stream and consumer" product setup --max-bytes=1GiB
    claim "check finds everything in order" product check
}

start_and_stop() {
    step "start"
    claim "systemctl start returns when the daemon is ready" timeout 120 nsenter --target "$leader" --all -- systemctl start "$unit"
    claim "it is active" equal active "$(property ActiveState)"
    claim "healthcheck agrees" product healthcheck
    claim "publish" product publish --count 5
    claim "the 5 are processed" eventually 10 processed_exactly 5
    claim "the status line has ack floor and pending" eventually 15 is StatusText "ack floor 5, pending 0, ready"
    confinement
    claim "reload changes the log level" reload
    step "stop"
    claim "systemctl stop" in_guest systemctl stop "$unit"
    claim "exit code 0" equal "success 0" "$(property Result) $(property ExecMainStatus)"
    claim "the drain is in the journal" grep -q '"drained"' <(journal)
    claim "nothing is left of the write-ahead log and the lock" equal orders.db "$(ls "$guest/var/lib/order-processor")"
}

reload() {
    printf '[log]\nlevel = "debug"\n' >>"$guest/etc/order-processor/config.toml"
    in_guest systemctl reload "$unit" || return 1
    eventually 5 grep -q 'reloaded the log level' <(journal)
    local code=$?
    settings
    in_guest systemctl reload "$unit"
    return $code
}

confinement() {
    local status
    status=/proc/$(property MainPID)/status
    claim "no capabilities, no new privileges, system calls filtered" equal "0000000000000000 1 2" \
        "$(in_guest cat "$status" | awk '/^(CapBnd|NoNewPrivs|Seccomp):/ {printf "%s%s", separator, $2; separator = " "}')"
    # prlimit64 and /proc/stat are behind filters: the metrics of the process must survive that.
    claim "the metrics of the process are there" process_metrics
}

process_metrics() {
    local text name
    text=$(curl -s "http://127.0.0.1:$http_port/metrics")
    for name in cpu_seconds_total open_fds max_fds resident_memory_bytes start_time_seconds; do
        grep -q "^process_$name " <<<"$text" || {
            echo "  no process_$name"
            return 1
        }
    done
}

stop_in_a_backlog() {
    step "stop in the middle of a backlog"
    product publish --count "$orders" >/dev/null
    in_guest systemctl start "$unit"
    eventually 20 processed_more_than 500 || true
    local began=$SECONDS
    claim "systemctl stop" in_guest systemctl stop "$unit"
    claim "within the deadline" between 0 $((SECONDS - began)) 25
    claim "exit code 0" equal "success 0" "$(property Result) $(property ExecMainStatus)"
    local done_before floor
    done_before=$(processed)
    claim "it was in the middle" between 500 "$done_before" $((orders - 1))
    floor=$(product status --json | json ack_floor.stream_seq)
    claim "all that was committed is acknowledged" equal "$done_before" "$floor"

    step "start again"
    in_guest systemctl start "$unit"
    claim "the rest is processed" eventually 60 processed_exactly $((orders + 5))
    eventually 10 is_metric consumer_num_ack_pending 0 || true
    claim "from the ack floor on, nothing below it came again" equal $((orders + 5 - floor)) "$(metric deliveries_total)"
    claim "no duplicates" equal 0 "$(metric 'outcomes_total{outcome="duplicate"}')"
}

is_metric() {
    [[ $(metric "$1") == "$2" ]]
}

kill_in_a_backlog() {
    step "kill -9 in the middle of a backlog"
    local restarts total=$((2 * orders + 5)) before
    restarts=$(property NRestarts)
    before=$(processed)
    product publish --count "$orders" >/dev/null &
    eventually 20 processed_more_than $((before + 200)) || true
    in_guest sh -c "kill -KILL $(property MainPID)"
    claim "systemd starts it again" eventually 30 is NRestarts $((restarts + 1))
    wait $!
    claim "everything is processed" eventually 90 processed_exactly "$total"
    claim "nothing twice" equal "$total" "$(rows "$guest/var/lib/order-processor/orders.db" 'SELECT count(DISTINCT stream_seq) FROM orders')"
    claim "the ack floor reaches the end" eventually 10 is_metric consumer_ack_floor_stream_seq "$total"
    claim "no dead letters" equal 0 "$(metric dead_letters)"
}

audit() {
    step "audit"
    local database=$guest/var/lib/order-processor/orders.db missing=7
    claim "an audit finds nothing missing, beside the daemon" in_guest systemctl start order-processor-audit.service
    claim "the timer is off until somebody wants it" equal disabled "$(in_guest systemctl is-enabled order-processor-audit.timer)"
    claim "and then on" in_guest systemctl --quiet enable --now order-processor-audit.timer
    claim "with a next time" grep -q order-processor-audit.timer <(in_guest systemctl list-timers --no-pager)
    start_node_exporter
    claim "node_exporter says that it did not fail" eventually 15 node_exporter_says failed 0
    python3 -c 'import sqlite3, sys
with sqlite3.connect(sys.argv[1]) as database:
    for table in ("orders", "processed_ids"):
        database.execute(f"DELETE FROM {table} WHERE stream_seq = ?", (sys.argv[2],))' "$database" "$missing"
    claim "with an order missing the audit fails" fails in_guest systemctl start order-processor-audit.service
    claim "the journal names the order" grep -qE "^missing +$missing, " \
        <(in_guest journalctl --unit order-processor-audit.service --output cat --no-pager)
    claim "node_exporter says so, as the alert asks" eventually 15 node_exporter_says failed 1
    claim "pause" product pause --reason "audit --repair"
    claim "the order is applied" product audit --repair
    claim "resume" product resume
    claim "the daemon goes on" eventually 15 healthy
    claim "the next audit finds nothing missing" in_guest systemctl start order-processor-audit.service
    claim "and node_exporter says so" eventually 15 node_exporter_says failed 0
}

# The systemd collector asks the guest's systemd.
start_node_exporter() {
    node_port=$(free_port)
    cp "$(command -v prometheus-node-exporter)" "$guest/root/node_exporter"
    in_guest systemd-run --quiet --unit=node_exporter /root/node_exporter --collector.disable-defaults --collector.systemd \
        --web.listen-address="127.0.0.1:$node_port"
}

node_exporter_says() {
    curl -s "http://127.0.0.1:$node_port/metrics" |
        grep -qx "node_systemd_unit_state{name=\"order-processor-audit.service\",state=\"$1\",type=\"oneshot\"} $2"
}

watchdog() {
    step "a daemon that hangs"
    override WatchdogSec=4s RestartSec=1s
    in_guest systemctl restart "$unit"
    local pid restarts
    pid=$(property MainPID)
    restarts=$(property NRestarts)
    sleep 6
    claim "the watchdog leaves it alone while it works" equal "$pid" "$(property MainPID)"
    in_guest sh -c "kill -STOP $pid"
    claim "SIGSTOP: the watchdog ends it and it is started again" eventually 30 is NRestarts $((restarts + 1))
    claim "the journal says why" grep -q 'Watchdog timeout' <(journal)
    claim "and it works again" eventually 15 healthy
    no_override
    in_guest systemctl stop "$unit"
}

bad_settings() {
    step "a bad setting"
    local since
    printf '[batch]\nmax_message = 20\n' >"$guest/etc/order-processor/config.toml"
    since=$(in_guest date '+%F %T')
    claim "start fails" fails in_guest systemctl start "$unit"
    claim "with exit code 2" equal "exit-code 2" "$(property Result) $(property ExecMainStatus)"
    # More than RestartSec, which a restart would need.
    sleep 7
    claim "no restart" equal "failed 0" "$(property ActiveState) $(property NRestarts)"
    claim "one line in the journal says what is wrong" equal 1 "$(journal --since "$since" | grep -c 'batch.max_message .*unknown key')"

    # Why the unit has no ExecStartPre: its exit code 2 would not keep systemd from trying again.
    override 'ExecStartPre=/usr/bin/order-processor config' 'RestartSec=100ms'
    in_guest systemctl start --no-block "$unit"
    claim "a check before the start would make it a restart loop" eventually 10 restarts_often
    in_guest systemctl stop "$unit"
    no_override
    settings
    in_guest systemctl reset-failed "$unit"
}

restarts_often() {
    (($(property NRestarts) > 2))
}

override() {
    mkdir -p "$guest/etc/systemd/system/$unit.d"
    printf '%s\n' '[Service]' "$@" >"$guest/etc/systemd/system/$unit.d/test.conf"
    in_guest systemctl daemon-reload
}

no_override() {
    rm -r "$guest/etc/systemd/system/$unit.d"
    in_guest systemctl daemon-reload
}

says() {
    [[ $(property StatusText) == "$1"* ]]
}

quietly() {
    "$@" >"$work/quiet" 2>&1 || {
        sed 's/^/  | /' "$work/quiet"
        return 1
    }
}

fails() {
    ! "$@" >/dev/null 2>&1
}

server_away() {
    step "the server is away"
    end "$nats_pid"
    in_guest systemctl start --no-block "$unit"
    claim "it says that it cannot connect" eventually 15 says 'not ready: nats: '
    sleep 6
    claim "it stays up, not ready" equal "activating start" "$(property ActiveState) $(property SubState)"
    claim "healthcheck says no" fails product healthcheck
    start_nats "$nats_port" "$work/nats"
    claim "it is active when the server comes" eventually 30 is ActiveState active
    end "$nats_pid"
    claim "a server lost later does not end it" eventually 15 says 'not ready: nats: '
    claim "the unit stays active" equal active "$(property ActiveState)"
    start_nats "$nats_port" "$work/nats"
    claim "and it is ready again" eventually 30 healthy
}

log_in() {
    step "log in with a secret that only root can read"
    local folder=$guest/etc/order-processor/credentials
    end "$nats_pid"
    start_nats "$nats_port" "$work/nats" --auth secret-token
    (umask 077 && echo secret-token >"$folder/nats.token")
    sed -i '/^url = "nats:/a token_file = "/run/credentials/order-processor.service/nats_nats.token"' \
        "$guest/etc/order-processor/config.toml"
    in_guest systemctl restart "$unit"
    claim "the daemon is bound" healthy
    claim "an audit logs in with the same settings" in_guest systemctl start order-processor-audit.service
    claim "nobody else reads the secret" fails in_guest runuser -u nobody -- cat /run/credentials/order-processor.service/nats_nats.token
    claim "the secret is not in the journal" fails grep -q secret-token <(journal)
    end "$nats_pid"
    start_nats "$nats_port" "$work/nats"
    settings
    in_guest systemctl restart "$unit"
}

upgrade_and_remove() {
    step "upgrade, remove, purge"
    local pid
    pid=$(property MainPID)
    # The same version again goes the same way as a newer one.
    claim "an upgrade keeps the settings" quietly in_guest dpkg --force-confold --install /root/order-processor.deb
    claim "and restarts the daemon" eventually 15 restarted "$pid"
    claim "which is ready" eventually 15 healthy
    claim "with its settings" grep -q "$nats_port" "$guest/etc/order-processor/config.toml"
    claim "remove stops the daemon" quietly in_guest apt-get remove -qq -y order-processor
    claim "and keeps the database" test -f "$guest/var/lib/order-processor/orders.db"
    claim "purge takes it, too" quietly in_guest apt-get purge -qq -y order-processor
    claim "nothing is left" equal "" "$(find "$guest"/{etc,var/lib} -path '*order-processor*' -not -path '*/var/lib/dpkg/*')"
}

restarted() {
    [[ $(property MainPID) != "$1" ]] && is ActiveState active
}

clean_up() {
    [[ -n $leader ]] || return 0
    # Not the nspawn process itself: signalling it can leave the guest's process 1 behind.
    in_guest systemctl poweroff --force >/dev/null 2>&1 || true
    eventually 10 gone "$nspawn" || kill -KILL "$leader" 2>/dev/null || true
    wait "$nspawn" 2>/dev/null || true
}

gone() {
    ! kill -0 "$1" 2>/dev/null
}

main "$@"
