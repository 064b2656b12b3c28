# Places run folders (a tar on stdin) and submits their jobs; arguments: operations.
# Prints OPERATION, VERDICT, JOB and MESSAGE with tabs between them. Verdicts: submitted, already, adopted, refused (surely
# no job), unknown (perhaps a job: the next call looks first), unplaced (its files could not be written), foreign (the
# fabric of this name is another state's: the first that starts something here owns it, until nothing of it is left).
# `: step` marks the places at which the tests kill this program.
in=
trap '[ -z "$in" ] || rm -rf "$in"' EXIT
# What a killed call left, keys included, does not stay.
[ ! -d "$units" ] || find "$units" -maxdepth 1 -name '.in.*' -mmin +60 -exec rm -rf {} + 2>/dev/null
if ! { mkdir -p "$units" && touch "$units/.here" && in=$(mktemp -d "$units/.in.XXXXXXXX") && tar -x -f - -C "$in"; }; then
  for op; do printf '%s\tunplaced\t\tits files cannot be written in %s\n' "$op" "$units"; done
  exit 0
fi
: step
# Whose it is, is decided and the folders are placed in one go: what is placed says whose it is. Where nothing of another
# state is left, its mark counts no more.
if [ -s "$in/.owner" ]; then
  read -r ours _ <"$in/.owner"
  if command -v flock >/dev/null 2>&1; then
    exec 8>>"$units/.owner.lock"
    flock -w 60 8 2>/dev/null
    if [ $? -eq 1 ]; then # another call holds it; any other code is a file system without locks
      for op; do printf '%s\tunknown\t\tanother call holds the lock of %s\n' "$op" "$units"; done
      exit 0
    fi
  fi
  if [ -s "$units/.owner" ]; then read -r theirs who <"$units/.owner"; else theirs=$ours; fi
  if [ "$theirs" != "$ours" ] && cat "$units"/*/meta.json 2>/dev/null | grep -qF "\"lineage\":\"$theirs"; then
    for op; do printf '%s\tforeign\t\t%s (lineage %s)\n' "$op" "$who" "$theirs"; done
    exit 0
  fi
  mv "$in/.owner" "$units/.owner"
  for op; do [ -d "$units/$op" ] || mv -T "$in/$op" "$units/$op" 2>/dev/null; done
  exec 8>&-
fi

#@submitting@
