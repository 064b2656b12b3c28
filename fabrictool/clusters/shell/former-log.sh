# The last lines of the log that was kept of a unit that is gone; arguments: folder of the logs ("-": `logs` of the base
# folder), lines, and how the names of its operations begin. The youngest counts.
logs=$1
[ "$logs" != - ] || logs=$base/logs
case $logs in /*) ;; "~/"*) logs=$HOME/${logs#??} ;; *) logs=$HOME/$logs ;; esac
youngest=$(ls -t "$logs/$fabric/$3"*.log 2>/dev/null | head -n 1)
[ -z "$youngest" ] || tail -n "$2" "$youngest"
