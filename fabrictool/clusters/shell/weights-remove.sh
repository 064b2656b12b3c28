# Removes sets; arguments: their names.
for set; do
  case $set in sha256-*) ;; *) exit 1 ;; esac
  # Out of the way first: whoever is cut off leaves nothing that looks complete.
  if [ -d "$base/$set" ]; then rm -rf "$base/part-$set" && mv "$base/$set" "$base/part-$set" || exit 1; fi
  rm -rf "$base/part-$set" "$base/.fetch-$set" || exit 1
done
