# The container image: the binary, a C library and CA certificates; no shell.
#
#   docker build -t order-processor .
#   docker run --read-only --cap-drop=ALL -v orders:/data -e ORDER_PROCESSOR__NATS__URL=nats://nats:4222 order-processor
#
# Both bases are arguments, so that they can be pinned to a digest or come from a registry of your own.
ARG BUILD_IMAGE=rust:1-bookworm
ARG RUNTIME_IMAGE=gcr.io/distroless/cc-debian12:nonroot

FROM ${BUILD_IMAGE} AS build
# dev is there for tests, which compile often.
ARG PROFILE=release
WORKDIR /build

# The dependencies alone first: their layer is built again only when they change. For that, cargo needs a package that
# compiles, with the targets that Cargo.toml names.
COPY Cargo.toml Cargo.lock ./
RUN mkdir -p src tests/it benches \
    && touch src/lib.rs tests/it/main.rs benches/bench.rs \
    && echo 'fn main() {}' >src/main.rs \
    && cp src/main.rs build.rs \
    && cargo build --locked --profile "$PROFILE" --bin order-processor

# cargo goes by time stamps, and these files may be older than the stand-ins above.
COPY . .
RUN find build.rs src -exec touch {} + \
    && cargo build --locked --profile "$PROFILE" --bin order-processor \
    && folder=$([ "$PROFILE" = dev ] && echo debug || echo "$PROFILE") \
    && mkdir -p /image/usr/bin /image/data /image/usr/share/doc/order-processor \
    # Debug information is most of the size; the symbols stay, for readable backtraces.
    && strip --strip-debug -o /image/usr/bin/order-processor "target/$folder/order-processor" \
    && cp LICENSE config/default.toml /image/usr/share/doc/order-processor/

FROM ${RUNTIME_IMAGE}
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="order-processor" \
    org.opencontainers.image.description="Applies each order of a JetStream stream to SQLite once" \
    org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.version="${VERSION}" \
    org.opencontainers.image.revision="${REVISION}"

# 65532 is `nonroot` in distroless images. By number, so that Kubernetes can tell that it is not root. A fresh volume at /data
# takes its owner from here.
COPY --from=build --chown=0:0 /image/usr /usr
COPY --from=build --chown=65532:65532 /image/data /data
USER 65532:65532
WORKDIR /data
VOLUME /data
ENV ORDER_PROCESSOR__DATABASE__URL=sqlite:///data/orders.db \
    ORDER_PROCESSOR__HTTP__LISTEN=0.0.0.0:9464
EXPOSE 9464
# The daemon drains on it; give it more than shutdown.timeout (25 s) before a kill: `docker stop --time 30`.
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=3 CMD ["/usr/bin/order-processor", "healthcheck"]
ENTRYPOINT ["/usr/bin/order-processor"]
CMD ["run"]
