# Takes one part of a file (stdin); arguments: set, file, octets before this part, octets with it, octets of the file.
# A connection that breaks looks like the end of stdin, hence the sizes.
file=$base/part-$1/$2
[ "$3" -ne 0 ] || : >"$file.part" || exit 1
[ "$(wc -c <"$file.part")" -eq "$3" ] || { echo "the part before was not stored" >&2; exit 1; }
cat >>"$file.part" && [ "$(wc -c <"$file.part")" -eq "$4" ] || { echo "this part was not stored whole" >&2; exit 1; }
[ "$4" -ne "$5" ] || mv "$file.part" "$file"
