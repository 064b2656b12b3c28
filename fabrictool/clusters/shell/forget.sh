# Removes run folders, identity first; arguments: for how many minutes logs are kept (0: not at all), in which folder ("-":
# `logs` of the base folder), and operations.
code=0
minutes=$1; logs=$2; shift 2
[ "$logs" != - ] || logs=$base/logs
case $logs in /*) ;; "~/"*) logs=$HOME/${logs#??} ;; *) logs=$HOME/$logs ;; esac
for op; do
  case $op in *[!a-z0-9._-]*|''|.*) continue ;; esac
  if [ "$minutes" -gt 0 ] && [ -s "$units/$op/log" ]; then
    # Where the logs cannot be kept the folder goes all the same: its keys must not stay.
    mkdir -p "$logs/$fabric" && cp "$units/$op/log" "$logs/$fabric/$op.log" || code=1
  fi
  rm -rf "$units/$op/identity" "$units/$op/keys.json" && rm -rf "${units:?}/$op" || code=1
done
if [ "$minutes" -gt 0 ] && [ -d "$logs/$fabric" ]; then
  find "$logs/$fabric" -name '*.log' -mmin "+$minutes" -exec rm -f {} + || code=1
fi
if [ -e "$base/on-boot" ] && [ -z "$(find "$base/units" -mindepth 3 -maxdepth 3 -name again 2>/dev/null | head -n 1)" ]; then
  # Nothing here comes back any more.
#@crontab@
  if crontab_now 2>/dev/null && printf '%s\n' "$now" | grep -qxF "$line"; then
    left=$(printf '%s\n' "$now" | grep -vxF "$line")
    if [ -n "$left" ]; then printf '%s\n' "$left" | crontab - || code=1; else crontab -r || code=1; fi
  fi
  rm -f "$base/on-boot" "$base"/units/*/.boot.lock
fi
exit $code
