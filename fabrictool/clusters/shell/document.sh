# The status document that a unit wrote last; argument: its operation.
cat "$units/$1/status.json" 2>/dev/null || true
