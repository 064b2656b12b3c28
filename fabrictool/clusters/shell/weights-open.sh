# Begins to stage a set, or goes on, or mends one that was found damaged; arguments: its name, and `fetch` where it will
# be fetched from there; stdin: its list. Prints what is stored of each file, -1: all of it; or `staged`; or `busy` and on
# which machine somebody fetches it.
set=$1 part=$base/part-$1 mends=
if [ -d "$base/$set" ] && [ -e "$base/$set/.seen" ]; then echo staged; exit 0; fi
# Who fetches looks closer: it knows one that was killed from one that lives, whose file is named after it then.
lock=$(find "$base/.fetch-$set" -name 'lock*' -mmin -1 2>/dev/null | head -n 1)
if [ "$2" != fetch ] && [ -n "$lock" ]; then
  printf 'busy\t%s\n' "$(cut -d' ' -f1 "$lock")"; exit 0
fi
if [ -d "$base/$set" ]; then mends=1; rm -rf "$part" && mv "$base/$set" "$part" || exit 1; fi
mkdir -p "$part" && cat >"$part/.LIST.new" && mv "$part/.LIST.new" "$part/.LIST" || exit 1
[ "sha256-$(sha256sum <"$part/.LIST" | cut -c1-64)" = "$set" ] || { echo "the list was not stored whole" >&2; exit 1; }
if [ -n "$mends" ]; then
  cd "$part" || exit 1
  LC_ALL=C sha256sum -c .LIST 2>/dev/null | sed -n 's/: FAILED.*//p' | while read -r name; do rm -f "$name"; done
fi
while read -r sum name; do
  file=$part/$name
  mkdir -p "$(dirname "$file")" || exit 1
  if [ ! -e "$file" ] && [ -z "$mends" ]; then  # what is damaged here may be the same file there
    list=$(grep -lsF "$sum  " "$base"/sha256-*/.LIST | head -n 1)
    [ -z "$list" ] || ln "${list%/.LIST}/$(sed -n "s/^$sum  //p" "$list" | head -n 1)" "$file" 2>/dev/null
  fi
  stored=-1
  if [ ! -e "$file" ]; then
    stored=0
    [ ! -e "$file.part" ] || stored=$(wc -c <"$file.part")
  fi
  printf 'stored\t%s\t%s\n' "$((stored))" "$name"
done <"$part/.LIST"
