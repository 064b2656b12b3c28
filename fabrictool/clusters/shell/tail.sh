# The last lines of a log; arguments: operation, lines.
tail -n "$2" "$units/$1/log" 2>/dev/null || true
