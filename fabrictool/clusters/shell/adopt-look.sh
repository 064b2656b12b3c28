# Prints how an adopted server's agent is; arguments: its name.
cd "$base/adopted/$fabric/$1" || exit 66
echo @health; cat health.json 2>/dev/null
echo; echo @exit; cat exit.json 2>/dev/null
echo; echo @ended; cat ended 2>/dev/null
echo @log; tail -n 3 log 2>/dev/null
echo; echo @end
