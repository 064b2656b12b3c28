#!/usr/bin/env bash
# Observe, sign and save what the clusters say, and compare it with what was applied last. Changes nothing.
# Runs where the clusters can be reached and the federation's root key lies.
#
# BLUEPRINT  what is merged      OBSERVED  the observation goes there      OUT  drift.ndjson and drift.md go there
#
# Exits with 2 when something has drifted.
set -euo pipefail
blueprint=${BLUEPRINT:-blueprint.yaml} observed=${OBSERVED:-out/observation.json} out=${OUT:-out}
mkdir -p "$out" "$(dirname "$observed")"

fabrictool observe --blueprint "$blueprint" --out "$observed"
code=0
fabrictool reconcile --blueprint "$blueprint" --dry-run --detailed-exitcode --json > "$out/drift.ndjson" || code=$?
if [ "$code" != 0 ] && [ "$code" != 2 ]; then
  exit "$code"
fi
python3 - "$out/drift.ndjson" > "$out/drift.md" <<'PYTHON'
import html
import json
import sys

with open(sys.argv[1], encoding="utf-8") as file:
    events = [json.loads(line) for line in file]
drift = [event for event in events if event["type"] == "drift"]
print(f"### {len(drift)} units have drifted" if drift else "### Nothing has drifted")
print()
for event in drift:
    print(f"- {event['kind']}: <code>{html.escape(event['text'])}</code>")
PYTHON
cat "$out/drift.md"
exit "$code"
