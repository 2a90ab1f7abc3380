#!/usr/bin/env bash
# Runs the deploy tests one after the other, all of them or those named, and says at the end what each came to and what was not
# tested here. STRICT=1 makes a failure of that, for machines that should be able to do it all.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

# Many times what each takes: for a machine on which others work as well.
[[ ${PROFILE:-dev} == dev ]] && limit_s=1200 || limit_s=3600
names=("$@")
((${#names[@]})) || names=(lint prometheus backup systemd container)
summary=
code=0
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for name in "${names[@]}"; do
    started=$SECONDS
    ended=0
    timeout --foreground --kill-after=60 "$limit_s" "./$name.sh" 2>&1 | tee "$work/log" || ended=$?
    ((ended == 0 || ended == 77)) || code=1
    summary+=$(printf '%5d s  %s' $((SECONDS - started)) "$(tail -n 1 "$work/log")")$'\n'
    grep '^NOT TESTED: ' "$work/log" >>"$work/not-tested" || true
done
printf '\n%s' "$summary"
if [[ -s $work/not-tested ]]; then
    printf '\n%d not tested here:\n' "$(wc -l <"$work/not-tested")"
    cat "$work/not-tested"
    [[ -z ${STRICT:-} ]] || code=1
fi
exit $code
