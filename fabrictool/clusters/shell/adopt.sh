# Starts an agent inside a job, beside a server that somebody started there; arguments: its name, and the words of the
# command. Its folder comes as a tar on stdin. Its keys go when it ends.
name=$1; shift
place=$base/adopted/$fabric
mkdir -p "$place" || exit 75
find "$place" -mindepth 1 -maxdepth 1 -type d -mtime +7 -exec rm -rf {} + 2>/dev/null
if command -v flock >/dev/null 2>&1; then # held by what waits for the agent below
  exec 9>>"$place/$name.lock"
  flock -n 9 2>/dev/null || { [ $? -ne 1 ] || { echo running; exit 0; }; }
fi
rm -rf "${place:?}/$name"  # of one that has ended
tar -x -f - -C "$place" && chmod 700 "$place/$name/start.sh" || exit 75
cd "$place/$name" || exit 75
setsid nohup sh -c '"$@" "$PWD/start.sh" >>log 2>&1; echo $? >ended; rm -rf identity' ft-adopt "$@" </dev/null >/dev/null 2>&1 &
echo started
