# Sees to it that a host's gateways start again after its reboot; stdin: the program that does it, arguments: `cron` or
# `site`, who calls it. Says on stderr what is in the way.
mkdir -p "$base" && cat >"$base/on-boot.$$" && chmod 700 "$base/on-boot.$$" && mv "$base/on-boot.$$" "$base/on-boot" || exit 66
[ "$1" = cron ] || exit 0
#@crontab@
case $base in *[!A-Za-z0-9/._@+-]*) echo "a crontab cannot name the folder $base" >&2; exit 64 ;; esac
crontab_now || exit 69
printf '%s\n' "$now" | grep -qxF "$line" && exit 0
printf '%s\n' "$now" "$line" | grep -v '^$' | crontab - || exit 69
