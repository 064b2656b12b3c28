# Stops or kills jobs that are surely ours: the scheduler's own command compares the job's name, so a number that it uses
# again for somebody else's job is never touched. Arguments: pairs of an operation and its job, "-" where only the run
# folder knows it.
signal_job() {
#@signal@
}
while [ $# -ge 2 ]; do
  op=$1; j=$2; shift 2
  [ "$j" != - ] || j=$(cat "$units/$op/jobid" 2>/dev/null)
  [ -n "$j" ] || j=$(cat "$units/$op/claim" 2>/dev/null)
  [ -n "$j" ] || continue
  why=$(signal_job "$j" "ft-$op" 2>&1) || true
  [ -z "$why" ] || printf '%s\t%s\n' "$op" "$(printf %s "$why" | tr '\n\t' '  ')"
done
