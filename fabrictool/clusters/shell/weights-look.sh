# Lists sets of weights and the space beside them; argument: the folder of the fabrics' units.
units=$1; case $units in /*) ;; *) units=$HOME/$units ;; esac
echo @space
at=$base; while [ ! -d "$at" ]; do at=$(dirname "$at"); done
df -Pk "$at" 2>/dev/null | awk 'NR == 2 { print $4, $1 }'
echo @quota
quota -w 2>/dev/null
echo @lustre
if command -v lfs >/dev/null 2>&1; then
  project=$(lfs project -d "$at" 2>/dev/null | awk 'NR == 1 && $1 > 0 { print $1 }')
  for which in "-u $(id -un)" "-g $(stat -c %G "$at")" ${project:+"-p $project"}; do
    lfs quota -q $which "$at" 2>/dev/null | tr '\n' ' '; echo  # a long name has a line of its own
  done
fi
echo @sets
for set in "$base"/sha256-* "$base"/part-sha256-*; do
  [ -d "$set" ] || continue
  name=${set##*/}
  used=$(grep -lsF "$base/${name#part-}" "$units"/*/*/spec.json "$units"/*/*/next/*/spec.json | wc -l)
  printf '%s\t%s\t%s\n' "$name" "$(du -sk "$set" | cut -f1)" "$((used))"
done
echo @end
