# The status pages on this machine's loopback, a line each: `FABRIC/OPERATION`, a tab, its process.json. Of one fabric,
# or, where that is `-`, of all. The folders may be shared: the lock says on which machine a unit was started, and when.
here=$(hostname); boot=$(cat /proc/sys/kernel/random/boot_id 2>/dev/null)
for file in "$base"/units/*/*/process.json; do
  folder=${file%/process.json}; operation=${folder##*/}; name=${folder%/*}; name=${name##*/}
  case $fabric in -|"$name") ;; *) continue ;; esac
  [ -e "$file" ] && [ ! -e "$folder/exit.json" ] || continue
  if grep -qF "\"$here\"" "$folder/lock" 2>/dev/null && grep -qF "$boot" "$folder/lock"; then
    printf '%s/%s\t' "$name" "$operation"; cat "$file"; echo
  else
    printf '%s/%s\n' "$name" "$operation"
  fi
done
echo @end
