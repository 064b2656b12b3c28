# Compares a set that was sent with its list, and gives it its name; prints `staged`, or what is damaged and was removed.
set=$1
if [ -d "$base/$set" ]; then echo staged; exit 0; fi
cd "$base/part-$set" || exit 1
damaged=$(LC_ALL=C sha256sum -c .LIST 2>/dev/null | sed -n 's/: FAILED.*//p')
if [ -n "$damaged" ]; then
  printf '%s\n' "$damaged" | while read -r name; do rm -f "$name" "$name.part"; printf 'damaged\t%s\n' "$name"; done
  exit 0
fi
while read -r sum name; do stat -c '%s %.Z %i' -- "$name" || exit 1; done <.LIST >.seen || exit 1
sync .LIST .seen 2>/dev/null
cd "$base" && mv "part-$set" "$set" && echo staged
