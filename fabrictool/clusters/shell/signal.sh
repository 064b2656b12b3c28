# Stops or kills jobs that are surely ours: the job's name is compared first, so a number that the scheduler uses again
# for somebody else's job is never touched. Arguments: pairs of an operation and its job, "-" where only the run
# folder knows it.
signal_job() {
#@signal@
}
err=$(mktemp) || exit 75
trap 'rm -f "$err"' EXIT
while [ $# -ge 2 ]; do
  op=$1; j=$2; shift 2
  rm -rf "${units:?}/$op/next" # who is to leave has nobody follow
  [ ! -e "$units/$op/again" ] || touch "$units/$op/stopped" 2>/dev/null || rm -f "$units/$op/again" # nor after a reboot
  [ "$j" != - ] || j=$(cat "$units/$op/jobid" 2>/dev/null)
  [ -n "$j" ] || j=$(cat "$units/$op/claim" 2>/dev/null)
  [ -n "$j" ] || continue
  signal_job "$j" "ft-$op" >"$err" 2>&1 || true
  [ ! -s "$err" ] || printf '%s\t%s\n' "$op" "$(tr '\n\t' '  ' <"$err")"
done
