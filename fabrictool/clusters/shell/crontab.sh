line="@reboot /bin/sh $base/on-boot"
# Sets now to the user's crontab; fails where it cannot be read, for then nothing may be written over it.
crontab_now() {
  command -v crontab >/dev/null 2>&1 || { echo "there is no program crontab" >&2; return 1; }
  if now=$(crontab -l 2>&1); then return 0; fi
  case $now in *"no crontab for"*) now=; return 0 ;; esac
  printf '%s\n' "$now" >&2
  return 1
}
