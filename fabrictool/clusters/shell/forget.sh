# Removes run folders, identity first; arguments: operations.
code=0
for op; do
  case $op in *[!a-z0-9._-]*|''|.*) continue ;; esac
  rm -rf "$units/$op/identity" "$units/$op/keys.json" && rm -rf "${units:?}/$op" || code=1
done
exit $code
