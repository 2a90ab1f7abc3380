# What a developer runs; `make` alone lists it. Nothing here but deploy-test needs root or leaves the folder.
.DEFAULT_GOAL := help
.PHONY: help build demo run test docs torture fuzz bench deb deploy-test lint clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

build: ## compile the daemon (dev profile)
	cargo build --locked

demo: ## play the whole story on a real server, with the real binary; HANDLER=sql or http for an effect of your own
	@tests/tools/demo$(if $(HANDLER),-$(HANDLER)).sh

run: ## start a server, set it up and run the daemon in the foreground; Ctrl-C stops
	@tests/tools/run.sh

# Tests mostly wait for servers and timers: three for each core keep the cores busy. Each has a server and a daemon of its own.
test: export RUST_TEST_THREADS ?= $(shell n=$$(nproc); echo $$((n < 8 ? 3 * n : 24)))
test: ## run all tests; ARGS="story" picks some
	@server=$$(tests/tools/nats-server.sh) && NATS_SERVER="$$server" cargo test --locked $(ARGS)

docs: ## rewrite the reference pages and the output of the console blocks in README.md and docs/
	@server=$$(tests/tools/nats-server.sh) && NATS_SERVER="$$server" UPDATE_DOCS=1 cargo test --locked --test it docs::

torture: ## kill, freeze and cut worker and server at random, 2 minutes; ROUNDS=n for more, SEED=n to repeat a run
	@server=$$(tests/tools/nats-server.sh) && NATS_SERVER="$$server" ROUNDS="$(ROUNDS)" SEED="$(SEED)" \
		cargo test --locked --test it $(ARGS) torture -- --ignored --nocapture

SECONDS = 60
TARGETS = delivery quarantine config
fuzz: ## feed random bytes to what reads from outside (needs cargo-fuzz); SECONDS=600 TARGETS=config for more of one
	@cp Cargo.lock fuzz/Cargo.lock
	@for target in $(TARGETS); do mkdir -p fuzz/corpus/$$target && \
	cargo fuzz run --sanitizer none $$target fuzz/corpus/$$target fuzz/seeds/$$target -- \
	-max_total_time=$(SECONDS) -rss_limit_mb=1024 || exit; done

bench: PROFILE ?= release
bench: ## measure the release build against no database at all, 3 to 6 minutes; ARGS="rates handlers memory latency ids calls" picks
	@server=$$(tests/tools/nats-server.sh) && NATS_SERVER="$$server" \
		cargo bench --locked --profile $(PROFILE) --bench bench -- $(ARGS)

deb: ## build the Debian package with cargo-deb (cargo install --locked cargo-deb): target/debian/*.deb
	cargo build --release --locked
	deploy/debian/documents.sh "$${CARGO_TARGET_DIR:-target}/release/order-processor"
	cargo deb --no-build

deploy-test: ## run what is in deploy/ for real: package, container, Prometheus; as root, 6 minutes; ARGS="systemd" picks
	@STRICT="$(STRICT)" deploy/tests/run.sh $(ARGS)

lint: ## formatting, clippy and rustdoc, warnings are errors; licences and sources of dependencies
	cargo fmt --check
	cargo clippy --all-targets --locked -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --no-deps --document-private-items --locked
	tests/tools/deny.sh

clean: ## remove what was built and fetched, and the data of `make run`
	cargo clean
	rm -rf .tools
