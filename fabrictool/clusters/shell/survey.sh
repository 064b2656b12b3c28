# Prints sections. `@end` comes last, so what was cut off is seen.
echo @now; date +%s
echo @host; hostname; echo "$HOME"
echo @base; echo "$base"
echo @environment; readlink "$base/env/current" 2>/dev/null
echo @files
# A file that is there and cannot be read (a stale handle, no rights) makes the whole look unknown: it is not absent.
for name in spec.json meta.json jobid attempt claim again process.json health.json exit.json dormant; do
  set --
  for file in "$units"/*/"$name"; do [ ! -e "$file" ] || set -- "$@" "$file"; done
  [ $# -gt 0 ] || continue
  grep -H '' "$@" /dev/null || [ $? -eq 1 ] || exit 75
done
# The file server's clock beside the node's own: either may be wrong.
find "$units" -maxdepth 2 -name health.json -printf '%p.mtime:%T@\n' 2>/dev/null
echo @next
for file in "$units"/*/next/*-*/submit; do [ ! -e "$file" ] || echo "$file"; done
[ ! -e "$units/.here" ] || { echo @here; echo yes; }
echo @owner; cat "$units/.owner" 2>/dev/null
#@scheduler@
echo @end
