# Removes run folders, identity first; arguments: operations.
for op; do
  case $op in *[!a-z0-9._-]*|''|.*) continue ;; esac
  rm -rf "$units/$op/identity" "$units/$op/keys.json" && rm -rf "${units:?}/$op"
done
