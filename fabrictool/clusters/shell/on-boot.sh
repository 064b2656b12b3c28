#!/bin/sh
# fabrictool: starts the gateways of this host again after a reboot. The user's crontab calls it, or the site in a way of
# its own; gateways that run, that were stopped or that are another host's stay as they are, so it may be called at any time.
base=$(cd "$(dirname "$0")" && pwd) || exit 66
# A redirection of `exec` that fails ends the shell: on a full disk gateways come back all the same.
! touch "$base/on-boot.log" 2>/dev/null || exec >>"$base/on-boot.log" 2>&1
! touch "$base/.on-boot.lock" 2>/dev/null || exec 8>>"$base/.on-boot.lock"
flock 8 2>/dev/null # two calls at once start nothing twice; where there is no flock, one may lose its port to the other
here=$(hostname)
say() { echo "$(date -u +%Y-%m-%dT%H:%M:%SZ) ${d#"$base"/units/}: $1"; }
#@alive@
# Whether a younger one of the same address is there, which comes back instead. Names end in -gNUMBER-MARK.
succeeded() {
  op=${1##*/}; mine=${op##*-g}
  for o in "${1%-g*-*}"-g[0-9]*-*; do
    [ "${o%-g*-*}" = "${1%-g*-*}" ] && [ -e "$o/again" ] && [ ! -e "$o/stopped" ] || continue
    theirs=${o##*-g}
    [ "${theirs%%-*}" -le "${mine%%-*}" ] 2>/dev/null || return 0
  done
  return 1
}
for d in "$base"/units/*/*/; do
  d=${d%/}
  [ -e "$d/again" ] && [ ! -e "$d/stopped" ] || continue
  ! succeeded "$d" || continue
  host=$(cat "$d/again")
  if [ "$host" != "$here" ]; then say "it ran on $host, and this is $here"; continue; fi # hosts may share a home
  ! ft_alive "$d" || continue
  rm -f "$d"/claim "$d"/claim.* "$d/pid" "$d/exit.json" "$d/health.json" "$d/dormant"
  (cd "$d" && exec setsid sh ./job.sh </dev/null >>log 2>&1 8>&-) &
  i=0
  while [ $i -lt 100 ] && [ ! -s "$d/pid" ]; do i=$((i + 1)); sleep 0.05; done
  if [ -s "$d/pid" ]; then say "started again"; else say "it did not start; see its log"; fi
done
