# Takes one part of an archive (stdin); arguments: token of the upload, octets before this part, octets with it.
# A connection that breaks looks like the end of stdin, hence the sizes.
in=$base/env/.in.$1
if [ "$2" -eq 0 ]; then
  find "$base/env" -maxdepth 1 -name '.in.*' -mmin +720 -exec rm -rf {} + 2>/dev/null
  mkdir -p "$in" && : >"$in/archive" || exit 1
fi
[ "$(wc -c <"$in/archive")" -eq "$2" ] || { echo "the part before was not stored" >&2; exit 1; }
cat >>"$in/archive" && [ "$(wc -c <"$in/archive")" -eq "$3" ] && exit 0
echo "this part was not stored whole" >&2
exit 1
