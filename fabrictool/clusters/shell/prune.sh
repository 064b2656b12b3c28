# What no fabric uses any more; arguments: `list` or `remove`, and days for which things are kept. `remove` reads on stdin
# which paths it may remove, and decides again about each. Prints KIND, KiB, DAYS and PATH with tabs between them.
# What may still be used is not listed: a run folder whose job the scheduler knows or that wrote something lately, a
# release that a run folder names, an environment while one is being uploaded.
LC_ALL=C; export LC_ALL
verb=$1; days=$2; failed=0
[ "$verb" != remove ] || allowed=$(cat)
cd "$base" 2>/dev/null || { echo @end; exit 0; }
old() { [ -n "$(find "$1" -maxdepth 0 -mtime "+$(($2 - 1))" 2>/dev/null)" ]; } # at least so many days
lately() { [ -n "$(find "$1" -maxdepth 1 -mmin -30 2>/dev/null)" ]; }
kept() { lately "$1" || { [ "$days" -gt 0 ] && ! old "$1" "$days"; }; }
now=$(date +%s)
tell() { # KIND PATH
  line=$(printf '%s\t%s\t%s\t%s' "$1" "$(du -sk "$2" | cut -f1)" "$(( (now - $(stat -c %Y "$2")) / 86400 ))" "$2")
  if [ "$verb" = remove ]; then
    printf '%s\n' "$allowed" | grep -qxF "$2" || return 0
    rm -rf "${2:?}/identity" "${2:?}/next" && rm -rf "${2:?}" || { failed=1; return 0; }
  fi
  printf '%s\n' "$line"
}
names() { cat units/*/*/job.sh units/*/*/next/*/job.sh adopted/*/*/start.sh 2>/dev/null | grep -qF "$1/"; }
unused() { [ -z "$(find units adopted -mindepth 2 -maxdepth 2 -type d 2>/dev/null | head -n 1)" ]; }
alive() { #@living@
}
echo @items
for f in units/*/; do
  [ -d "$f" ] || continue
  units=$base/${f%/}
  listed=$(alive 2>&1) || { printf '%s\n' "$listed" | tail -n 3 >&2; exit 75; }
  for d in "$f"*/; do
    d=${d%/}
    [ -d "$d" ] || continue
    if printf '%s\n' "$listed" | awk -v name="ft-${d##*/}" '$2 == name { hit = 1 } END { exit !hit }'; then continue; fi
    kept "$d" || tell run "$d"
  done
  for d in "$f".in.*; do
    [ ! -d "$d" ] || ! old "$d" 1 || tell upload "$d"
  done
done
for f in adopted/*/; do
  [ -d "$f" ] || continue
  units=$base/${f%/}
  listed=$(alive 2>&1) || { printf '%s\n' "$listed" | tail -n 3 >&2; exit 75; }
  for d in "$f"*/; do
    d=${d%/} job=${d##*-} # the agent's name ends with its job's number
    [ -d "$d" ] || continue
    if [ ! -e "$d/ended" ] && printf '%s\n' "$listed" | awk -v job="$job" '$1 == job { hit = 1 } END { exit !hit }'; then continue; fi
    kept "$d" || { tell adopted "$d"; [ -d "$d" ] || rm -f "$d.lock"; }
  done
done
busy=
for d in env/.in.*; do
  [ -d "$d" ] || continue
  if old "$d" 1; then tell upload "$d"; else busy=yes; fi
done
for d in env/rel/*; do
  [ -d "$d" ] && [ -z "$busy" ] || continue
  if kept "$d" || names "$d"; then continue; fi
  if [ "env/$(readlink env/current 2>/dev/null)" = "$d" ]; then
    unused || continue
    [ "$verb" != remove ] || ! printf '%s\n' "$allowed" | grep -qxF "$d" || rm -f env/current
  fi
  tell environment "$d"
done
for d in cache/*; do
  [ -e "$d" ] || continue
  unused || break
  kept "$d" || tell cache "$d"
done
echo @end
exit $failed
