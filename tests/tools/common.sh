# What demo.sh and run.sh share: building the binary, starting a server, waiting. Sourced by bash, not run.

tools=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$tools/../.." && pwd)

# Builds the binary and sets $order_processor. PROFILE is dev (default) or release.
build() {
    local profile=${PROFILE:-dev} folder
    case $profile in
        dev) folder=debug ;;
        *) folder=$profile ;;
    esac
    (cd "$root" && cargo build --locked --quiet --profile "$profile" --bin order-processor) || exit 1
    order_processor=${CARGO_TARGET_DIR:-$root/target}/$folder/order-processor
}

# start_server PORT FOLDER: a JetStream server on loopback with file storage; PORT -1 is any free one. Sets $server_pid and
# $url. Fails, with the server's last line in $server_error, if the port is taken.
start_server() {
    local port=$1 folder=$2 ports
    mkdir -p "$folder"
    rm -f "$folder"/*.ports
    # Its own process group, so that Ctrl-C in the terminal does not take it away from under a draining daemon.
    set -m
    "$nats_server" --jetstream --addr 127.0.0.1 --port "$port" --store_dir "$folder" --ports_file_dir "$folder" \
        --log "$folder/server.log" &
    server_pid=$!
    set +m
    ports=$folder/$(basename "$nats_server")_$server_pid.ports
    until [ -s "$ports" ]; do
        if ! kill -0 "$server_pid" 2>/dev/null; then
            server_pid=
            server_error=$(tail -n 1 "$folder/server.log" 2>/dev/null)
            return 1
        fi
        sleep 0.05
    done
    url=$(python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["nats"][0])' "$ports")
}

# The first port from $1 on at which nobody listens.
free_port() {
    local port=$1
    while (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do
        port=$((port + 1))
    done
    echo "$port"
}

# Ends a child and waits for it; sets $exit_code.
stop() {
    local pid=$1 signal=${2:-TERM}
    kill -s "$signal" "$pid" 2>/dev/null || true
    exit_code=0
    wait "$pid" 2>/dev/null || exit_code=$?
}
