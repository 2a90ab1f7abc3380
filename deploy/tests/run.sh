#!/usr/bin/env bash
# Runs the deploy tests one after the other, all of them or those named, and says at the end what each came to.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

limit_s=600
names=("$@")
((${#names[@]})) || names=(lint prometheus backup systemd container)
summary=
code=0
log=$(mktemp)
trap 'rm -f "$log"' EXIT
for name in "${names[@]}"; do
    started=$SECONDS
    timeout --foreground --kill-after=60 "$limit_s" "./$name.sh" 2>&1 | tee "$log" || code=1
    summary+=$(printf '%5d s  %s' $((SECONDS - started)) "$(tail -n 1 "$log")")$'\n'
done
printf '\n%s' "$summary"
exit $code
