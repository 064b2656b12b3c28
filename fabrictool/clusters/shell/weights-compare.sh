# Compares sets with their lists; arguments: `all` or `changed`, sets. Of `changed` only files are hashed of a set in which
# a size, a time or an inode is another than when it was compared last. Prints whole, damaged FILE, partial or absent.
which=$1; shift
for set; do
  if [ ! -d "$base/$set" ]; then
    if [ -d "$base/part-$set" ]; then printf 'partial\t%s\n' "$set"; else printf 'absent\t%s\n' "$set"; fi
    continue
  fi
  cd "$base/$set" || exit 1
  if [ "sha256-$(sha256sum <.LIST 2>/dev/null | cut -c1-64)" != "$set" ]; then printf 'damaged\t%s\t.LIST\n' "$set"; continue; fi
  seen=$(while read -r sum name; do stat -c '%s %.Z %i' -- "$name" 2>/dev/null || echo absent; done <.LIST)
  if [ "$which" = changed ] && [ "$seen" = "$(cat .seen 2>/dev/null)" ]; then printf 'whole\t%s\n' "$set"; continue; fi
  damaged=$(LC_ALL=C sha256sum -c .LIST 2>/dev/null | sed -n 's/: FAILED.*//p' | head -n 20)
  if [ -z "$damaged" ]; then
    printf '%s\n' "$seen" >.seen 2>/dev/null
    printf 'whole\t%s\n' "$set"
  else
    rm -f .seen
    printf '%s\n' "$damaged" | while read -r name; do printf 'damaged\t%s\t%s\n' "$set" "$name"; done
  fi
done
