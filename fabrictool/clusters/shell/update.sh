# Gives units that run another spec, and the files beside it (a tar on stdin); arguments: operations. Prints those that
# have them. The spec comes last, for it says that all is there; each file comes whole or not at all.
in=
trap '[ -z "$in" ] || rm -rf "$in"' EXIT
in=$(mktemp -d "$units/.in.XXXXXXXX") && tar -x -f - -C "$in" || exit 75
for op; do
  [ -s "$units/$op/spec.json" ] || continue
  # A certificate before meta.json, which says when it ends: cut off between them, the next look renews it again.
  for file in "$in/$op"/identity/* "$in/$op"/*; do
    name=${file#"$in/$op/"}
    [ ! -f "$file" ] || [ "$name" = spec.json ] || mv -f "$file" "$units/$op/$name" || continue 2
  done
  # What may follow it was prepared by its former spec.
  rm -rf "$units/$op/next"
  [ ! -d "$in/$op/next" ] || mv -T "$in/$op/next" "$units/$op/next" || continue
  mv -f "$in/$op/spec.json" "$units/$op/spec.json" && echo "$op"
done
