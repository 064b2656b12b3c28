#!/usr/bin/env bash
# Plan a proposed change from a signed observation: no cluster is reached, no key and no secret is read.
#
# BLUEPRINT  what is proposed                     POLICY, ROOT  rules and root.crt: those of the target branch
# OBSERVED   what steps/drift.sh saved            OUT           plan.json, plan.txt and comment.md go there
#
# Exits with 6 when the policy denies the plan: plan and comment are there all the same.
set -euo pipefail
blueprint=${BLUEPRINT:-blueprint.yaml} policy=${POLICY:-policy.yaml} root=${ROOT:-root.crt}
observed=${OBSERVED:-out/observation.json} out=${OUT:-out}
mkdir -p "$out"
rm -f "$out/plan.json" "$out/plan.txt" "$out/comment.md"

fabrictool validate --blueprint "$blueprint"
code=0
fabrictool plan --blueprint "$blueprint" --offline --observed "$observed" --root "$root" --max-age "${MAX_AGE:-36h}" \
  --policy "$policy" --out "$out/plan.json" > "$out/plan.txt" || code=$?
if [ "$code" != 0 ] && [ "$code" != 6 ]; then
  exit "$code"
fi
cat "$out/plan.txt"
fabrictool show "$out/plan.json" --blueprint "$blueprint" --policy "$policy" --markdown \
  > "$out/comment.md" 2> /dev/null || [ $? = 6 ] # said above already
exit "$code"
