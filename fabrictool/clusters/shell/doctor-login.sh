# What a login node and the folder there can do; arguments: a token, then programs to look for. Leaves the folder
# doctor/TOKEN for the job of `doctor-node.sh`; `doctor-end.sh` removes it.
token=$1; shift
d=$base/doctor/$token
LC_ALL=C; export LC_ALL
echo @shell; { getent passwd "$(id -un)" 2>/dev/null || echo ":$SHELL"; } | sed 's/.*://'
echo @folder
if mkdir -p "$d" 2>"/tmp/.ft-doctor-$$"; then echo "$d"; else tail -n 1 "/tmp/.ft-doctor-$$"; fi
rm -f "/tmp/.ft-doctor-$$"
f=$d; while [ ! -d "$f" ]; do f=$(dirname "$f"); done
echo @space; df -Pk "$f" | tail -n 1 | awk '{ print $4, $6 }'
echo @inodes; df -Pi "$f" 2>/dev/null | tail -n 1 | awk '{ print $4 }'
echo @quota
quota -w 2>/dev/null | sed 1,2d
command -v lfs >/dev/null 2>&1 && lfs quota -q -u "$(id -un)" "$f" 2>/dev/null
echo @locks
if [ -d "$d" ]; then
  if ! command -v flock >/dev/null 2>&1; then echo "flock absent"
  elif ( exec 9>"$d/lock"; flock -n 9 && ! ( exec 8>"$d/lock"; flock -n 8 ) ) 2>/dev/null; then echo "flock works"
  else echo "flock fails"; fi
  echo one >"$d/one"
  if ln "$d/one" "$d/two" 2>/dev/null && ! ln "$d/one" "$d/two" 2>/dev/null; then echo "links work"; else echo "links fail"; fi
  printf '%s\n' "$token" >"$d/from-login"
fi
echo @programs
for p; do command -v "$p" >/dev/null 2>&1 && echo "$p"; done
echo @cron
command -v crontab
ps -e -o comm= 2>/dev/null | sed 's|.*/||' | grep -Ex 'd?crond?|fcron|cronie' | sed 's/^/runs /;q'
[ -d /proc/1 ] || echo unseen
echo @accounting
command -v sacct >/dev/null 2>&1 && { sacct -n -X -S now-1hours -o JobID 2>&1 >/dev/null | head -n 1; echo "asked"; }
echo @end
