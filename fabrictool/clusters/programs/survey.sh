# Prints sections. `@end` comes last, so what was cut off is seen.
echo @now; date +%s
echo @host; hostname; echo "$HOME"
echo @base; echo "$base"
echo @environment; readlink "$base/env/current" 2>/dev/null
echo @files
for name in spec.json meta.json jobid attempt claim process.json health.json exit.json; do
  grep -s -H '' "$units"/*/"$name" /dev/null
done
# The file server's clock beside the node's own: either may be wrong.
find "$units" -maxdepth 2 -name health.json -printf '%p.mtime:%T@\n' 2>/dev/null
#@scheduler@
echo @end
