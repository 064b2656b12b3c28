# The chain of a unit's session, which is public; argument: its operation.
cat "$units/$1/identity/session.crt" 2>/dev/null || true
