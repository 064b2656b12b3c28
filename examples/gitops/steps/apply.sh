#!/usr/bin/env bash
# Carry out what was merged, if it is still the change that was reviewed. Runs where the clusters can be reached.
#
# BLUEPRINT, POLICY  what was merged                OUT  fresh.json and apply.ndjson go there
# REVIEWED           the plan that was reviewed; it is only compared with, never carried out: who proposes a change
#                    can forge what its own pipeline saves
#
# Exits with 5 when another change would be made than the reviewed one (FT4405), with 6 when the policy denies it.
set -euo pipefail
blueprint=${BLUEPRINT:-blueprint.yaml} policy=${POLICY:-policy.yaml} out=${OUT:-out} reviewed=${REVIEWED:-}
mkdir -p "$out"

code=0
fabrictool plan --blueprint "$blueprint" --policy "$policy" --detailed-exitcode --out "$out/fresh.json" || code=$?
case $code in
  0) exit 0 ;; # nothing to do: an earlier run did it
  2) ;;
  *) exit "$code" ;;
esac
if [ -z "$reviewed" ] || [ ! -f "$reviewed" ]; then
  echo "no reviewed plan: nothing is changed; REVIEWED=FILE" >&2
  exit 5
fi
fabrictool apply "$out/fresh.json" --blueprint "$blueprint" --policy "$policy" --reviewed "$reviewed" --yes --json |
  tee "$out/apply.ndjson"
