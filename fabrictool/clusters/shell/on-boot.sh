#!/bin/sh
# fabrictool: starts the gateways of this host again after a reboot. The user's crontab calls it, or the site in a way of
# its own; gateways that run, that were stopped or that are another host's stay as they are, so it may be called at any time.
base=$(cd "$(dirname "$0")" && pwd) || exit 66
#@alive@
for d in "$base"/units/*/*/; do
  d=${d%/}
  [ -e "$d/again" ] && [ ! -e "$d/stopped" ] && [ -s "$d/claim" ] || continue
  case $(cat "$d/claim") in "$(hostname)".*) ;; *) continue ;; esac # hosts may share a home
  ! ft_alive "$d" || continue
  rm -f "$d"/claim "$d"/claim.* "$d/pid" "$d/exit.json" "$d/health.json"
  (cd "$d" && exec setsid sh ./job.sh </dev/null >>log 2>&1) &
done
