line="@reboot /bin/sh $base/on-boot"
work=
trap '[ -z "$work" ] || rm -rf "$work"' EXIT
! touch "$base/.on-boot.lock" 2>/dev/null || exec 8>>"$base/.on-boot.lock" # an `exec` that fails ends the shell
flock -w 30 8 2>/dev/null
# Copies the user's crontab to $work/now; fails where it cannot be read, for then nothing may be written over it.
table() {
  command -v crontab >/dev/null 2>&1 || { echo "there is no program crontab" >&2; return 1; }
  work=$(mktemp -d) || return 1
  crontab -l >"$work/now" 2>"$work/err" && return 0
  case $(cat "$work/err") in *"no crontab for"* | *"can't open"*"No such file"*) cp /dev/null "$work/now"; return 0 ;; esac
  cat "$work/err" >&2
  return 1
}
add_line() {
  case $base in *[!A-Za-z0-9/._@+-]*) echo "a crontab cannot name the folder $base" >&2; return 1 ;; esac
  table || return 1
  ! grep -qxF "$line" "$work/now" || return 0
  # A last line without its end would become one with ours.
  { cat "$work/now" && { [ -z "$(tail -c 1 "$work/now")" ] || echo; } && printf '%s\n' "$line"; } >"$work/new" || return 1
  crontab "$work/new"
}
remove_line() {
  table 2>/dev/null || return 0 # then we could not have written it either
  grep -qxF "$line" "$work/now" || return 0
  grep -vxF "$line" "$work/now" >"$work/new"
  [ $? -le 1 ] || return 1
  if [ -s "$work/new" ]; then crontab "$work/new"; else crontab -r; fi
}
# When nothing here comes back any more, nothing calls us. What cannot be looked at is not absent.
tidy_boot() {
  [ -e "$base/on-boot" ] || return 0
  left=$(find "$base/units" -mindepth 3 -maxdepth 3 -name again 2>/dev/null) || return 0
  [ -z "$left" ] || return 0
  remove_line && rm -f "$base/on-boot" "$base/on-boot.log" "$base/.on-boot.lock"
}
