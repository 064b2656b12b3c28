# Sees to it that gateways start again after a reboot of their host, or no longer do; stdin: the program that starts them;
# arguments: who calls it (`cron`, `site`, "-" for nobody), and operations. Says on stderr what is in the way.
way=$1; shift
if [ "$way" = - ]; then
  for op; do rm -f "$units/$op/again"; done
  [ -e "$base/on-boot" ] || exit 0
fi
#@crontab@
if [ "$way" = - ]; then
  tidy_boot
  exit
fi
cat >"$base/on-boot.$$" && chmod 700 "$base/on-boot.$$" && mv "$base/on-boot.$$" "$base/on-boot" || exit 66
if [ "$way" = cron ]; then add_line || exit 69; else remove_line || exit 69; fi
for op; do
  hostname >"$units/$op/again.$$" && mv "$units/$op/again.$$" "$units/$op/again" || exit 66
done
