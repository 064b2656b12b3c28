# Removes run folders, identity first; arguments: for how many minutes logs are kept (0: not at all), in which folder ("-":
# `logs` of the base folder), and operations. Exit 4: a log could not be kept, and its folder stays, without its keys.
code=0
minutes=$1; logs=$2; shift 2
[ "$logs" != - ] || logs=$base/logs
case $logs in /*) ;; "~/"*) logs=$HOME/${logs#??} ;; *) logs=$HOME/$logs ;; esac
for op; do
  case $op in *[!a-z0-9._-]*|''|.*) continue ;; esac
  rm -rf "$units/$op/identity" "$units/$op/keys.json" "$units/$op/next" || { code=1; continue; }
  if [ "$minutes" -gt 0 ] && [ -s "$units/$op/log" ]; then
    mkdir -p "$logs/$fabric" && cp "$units/$op/log" "$logs/$fabric/$op.log" || { [ $code = 1 ] || code=4; continue; }
  fi
  rm -rf "${units:?}/$op" || code=1
done
if [ "$minutes" -gt 0 ] && [ -d "$logs/$fabric" ]; then # only what bears an operation's name was put there by us
  find "$logs/$fabric" -maxdepth 1 -type f -name '*-g[0-9]*-????????.log' -mmin "+$minutes" -exec rm -f {} + || code=1
fi
if [ -e "$base/on-boot" ]; then
#@crontab@
  tidy_boot || code=1
fi
exit $code
