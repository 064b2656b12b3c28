# Submits a unit that was prepared to follow another one, from inside that one's job; arguments: the other one, and what
# was prepared (NUMBER-OPERATION in its folder `next`). It takes along what may follow it. Prints what `submit.sh` does.
# An operator's machine may do the same at the same time: who places the folder first has the operation.
next=$units/$1/next
spare=$2 op=${2#*-}
in=
trap '[ -z "$in" ] || rm -rf "$in"' EXIT
in=$(mktemp -d "$units/.in.XXXXXXXX") || exit 75
if [ ! -d "$units/$op" ] && [ -d "$next/$spare" ]; then
  [ -d "$next/$spare/next" ] || mkdir "$next/$spare/next" || exit 75
  cp "$next/lead" "$next/submit.sh" "$next/$spare/next/" || exit 75
  for other in "$next"/*-*; do
    [ "$other" = "$next/$spare" ] || mv "$other" "$next/$spare/next/" || exit 75
  done
  : step
  mv -T "$next/$spare" "$units/$op" 2>/dev/null
fi
: step
set -- "$op"

#@submitting@
