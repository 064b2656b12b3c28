# Submits the jobs of the units in $@ that are placed, or lie in $in; prints what `submit.sh` says.
here=$(hostname)

tell() {
  printf '%s\t%s\t%s\t%s\n' "$op" "$1" "$2" "$(printf %s "$3" | tr '\n\t' '  ' | cut -c1-300)"
}

# Sets j to the job that the scheduler has for this operation, by its name or its comment; fails when it does not answer.
look() {
  found=$( { #@lookup@
  } 2>"$in/err" ) || return 1
  j=$(printf '%s\n' "$found" | awk -v name="ft-$op" -v mark="op=$op" '
    $2 == name { print $1; exit }
    { n = split(substr($0, length($1 $2) + 3), fields, ";")
      for (i = 1; i <= n; i++) if (fields[i] == mark) { print $1; exit } }')
}

keep() {
  printf '%s\n' "$j" >"$d/jobid.$$"
  sync "$d/jobid.$$" 2>/dev/null
  mv "$d/jobid.$$" "$d/jobid"
}

# A lock that ends with whoever holds it, or a folder with its holder's name where the file system has no locks.
lock() {
  locked=
  if command -v flock >/dev/null 2>&1 && touch "$d/lock.submit" 2>/dev/null; then
    exec 9>>"$d/lock.submit"
    flock -w 60 9 2>/dev/null
    case $? in
      0) return 0 ;;
      1) return 1 ;; # somebody holds it, and its submission may still be on its way
    esac
  fi
  i=0
  while ! mkdir "$d/lock.d" 2>/dev/null; do
    h=; p=
    read -r h p 2>/dev/null <"$d/lock.d/holder"
    if dead "$h" "$p" || [ -n "$(find "$d/lock.d" -maxdepth 0 -mmin +10 2>/dev/null)" ]; then
      mv "$d/lock.d" "$d/lock.dead.$$" 2>/dev/null && rm -rf "$d/lock.dead.$$"
      continue
    fi
    i=$((i + 1))
    [ $i -lt 600 ] || return 1
    sleep 0.1
  done
  echo "$here $$" >"$d/lock.d/holder"
  locked=yes
}

# Whether the process of host $1 with the number $2 is surely gone.
dead() {
  [ "$1" = "$here" ] && [ -n "$2" ] && ! kill -0 "$2" 2>/dev/null
}

# Whether whoever made the attempt can still submit: not if its process is gone, nor after all retries of a submission.
over() {
  h=; p=
  read -r h p 2>/dev/null <"$d/attempt"
  dead "$h" "$p" || [ -n "$(find "$d/attempt" -mmin +15 2>/dev/null)" ]
}

unlock() {
  [ -z "$locked" ] || rm -rf "$d/lock.d"
  exec 9>&-
}

one() {
  j=
  if [ -s "$d/jobid" ]; then
    tell already "$(cat "$d/jobid")" ''
    return
  fi
  # A hard link is made by one caller only, even where login nodes do not share locks.
  printf '%s\n' "$here $$" >"$d/attempt.$$"
  : step
  if ln "$d/attempt.$$" "$d/attempt" 2>/dev/null; then
    rm -f "$d/attempt.$$"
  else
    rm -f "$d/attempt.$$"
    if [ -s "$d/claim" ]; then
      j=$(cat "$d/claim"); keep
      tell adopted "$j" 'its job had started'
      return
    fi
    if ! look; then
      tell unknown '' "the scheduler does not say whether it has the job: $(cat "$in/err")"
      return
    fi
    if [ -n "$j" ]; then
      keep
      tell adopted "$j" ''
      return
    fi
    if ! over; then
      tell unknown '' "another call tried $(find "$d/attempt" -printf '%TH:%TM' 2>/dev/null), and may not have ended"
      return
    fi
    printf '%s\n' "$here $$" >"$d/attempt.$$" && mv "$d/attempt.$$" "$d/attempt"
  fi
  : step
  out=$(sh "$d/submit" 2>"$in/why")
  code=$?
  : step
  j=$(printf '%s\n' "$out" | tail -n 1 | sed 's/[;[:space:]].*//')
  if [ $code -eq 0 ] && [ -n "$j" ]; then
    keep
    tell submitted "$j" ''
    : step
    return
  fi
  why="exit $code: $(cat "$in/why")"
  looked=
  j=
  for pause in 0 1 2; do
    sleep $pause
    if look; then looked=yes; else looked=; fi
    if [ -n "$j" ]; then
      keep
      tell adopted "$j" "$why"
      return
    fi
  done
  if [ -n "$looked" ] && printf '%s' "$why" | grep -Eq '#@refused@' && ! printf '%s' "$why" | grep -q 'Socket timed out'; then
    rm -f "$d/attempt"
    tell refused '' "$why"
  else
    tell unknown '' "$why"
  fi
}

for op; do
  d=$units/$op
  [ -d "$d" ] || mv -T "$in/$op" "$d" 2>/dev/null
  if [ ! -s "$d/submit" ]; then
    tell unplaced '' "there is no run folder $d"
    continue
  fi
  : step
  if ! lock; then
    tell unknown '' "another call holds the lock of $d"
    continue
  fi
  one
  unlock
done
