# What no fabric uses any more; arguments: `list` or `remove`, and days for which the dead are kept.
# Prints KIND, KiB, DAYS and PATH with tabs between them. What may still be used is not listed: a run folder whose job the
# scheduler knows or that wrote something lately, a release that a run folder names, anything at all while uploads run.
LC_ALL=C; export LC_ALL
verb=$1; days=$2
cd "$base" 2>/dev/null || { echo @end; exit 0; }
listed=$( { #@lookup@
} 2>&1 ) || { printf '%s\n' "$listed" | tail -n 3 >&2; exit 75; }
now=$(date +%s)
tell() { # KIND PATH
  age=$(( (now - $(stat -c %Y "$2")) / 86400 ))
  printf '%s\t%s\t%s\t%s\n' "$1" "$(du -sk "$2" | cut -f1)" "$age" "$2"
  [ "$verb" != remove ] || { rm -rf "${2:?}/identity" && rm -rf "${2:?}"; }
}
old() { [ -n "$(find "$1" -maxdepth 0 -mtime "+$(($2 - 1))" 2>/dev/null)" ]; } # at least so many days
lately() { [ -n "$(find "$1" -maxdepth 1 -mmin -30 2>/dev/null)" ]; }
echo @items
for d in units/*/*/; do
  d=${d%/}
  [ -d "$d" ] || continue
  if printf '%s\n' "$listed" | awk -v name="ft-${d##*/}" '$2 == name { found = 1 } END { exit !found }'; then continue; fi
  if lately "$d" || { [ "$days" -gt 0 ] && ! old "$d" "$days"; }; then continue; fi
  tell run "$d"
done
named=$(cat units/*/*/job.sh 2>/dev/null | grep -o 'env/rel/[0-9a-f]*' | sort -u)
used=$(find units -mindepth 2 -maxdepth 2 -type d 2>/dev/null | head -n 1)
current=$(readlink env/current 2>/dev/null)
for d in env/rel/*; do
  [ -d "$d" ] || continue
  if printf '%s\n' "$named" | grep -qx "$d"; then continue; fi
  if [ "env/$current" = "$d" ]; then
    [ -z "$used" ] || continue
    [ "$verb" != remove ] || rm -f env/current
  fi
  tell environment "$d"
done
for d in env/.in.* units/*/.in.*; do
  [ ! -d "$d" ] || ! old "$d" 1 || tell upload "$d"
done
if [ -z "$used" ]; then
  for d in cache/*; do [ ! -e "$d" ] || tell cache "$d"; done
fi
echo @end
