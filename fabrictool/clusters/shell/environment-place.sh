# Makes an uploaded archive the environment in use, or fails and leaves the one that was; arguments: token of the upload
# ("-": the release is there), name of the release, SHA-256 of the archive, how many releases to keep, Python code that
# must run ("": it cannot run on this machine). `: step` marks the places at which the tests kill this program.
token=$1; release=$2; sum=$3; keep=$4; code=$5
env=$base/env; in=$env/.in.$token; tree=$in/tree
fail() { echo "$1" | head -c 600; rm -rf "$in"; exit "$2"; }
use() { # the folder whose Python must run
  [ -z "$code" ] && { echo "not run here"; return 0; }
  "$1/bin/python" -P -c "$code" 2>&1
}
if [ "$token" = - ]; then
  in=$env/.in.$$; mkdir -p "$in"
  out=$(use "$env/rel/$release") || fail "$out" 4
else
  [ "$(sha256sum <"$in/archive" | cut -d' ' -f1)" = "$sum" ] || fail "what arrived is not what was sent" 3
  : step
  mkdir -p "$tree" "$env/rel"
  out=$(tar -xzf "$in/archive" -C "$tree" 2>&1) || fail "it cannot be unpacked: $out" 3
  : step
  [ "$(sha256sum <"$tree/MANIFEST" | cut -c1-16)" = "$release" ] || fail "its manifest has another name" 3
  out=$(cd "$tree" && LC_ALL=C sha256sum -c MANIFEST 2>&1) || fail "its files are damaged: $(echo "$out" | grep -v ': OK$')" 3
  out=$(use "$tree") || fail "$out" 4
  : step
  if [ -d "$env/rel/$release" ]; then mv "$env/rel/$release" "$in/damaged"; fi
  mv -T "$tree" "$env/rel/$release" || fail "it cannot be moved to its place" 3
fi
: step
touch "$env/rel/$release"
ln -s "rel/$release" "$in/current" && mv -T "$in/current" "$env/current" || fail "the link cannot be made" 3
: step
echo "used $(printf %s "$out" | tail -n 1)"
# Releases that a unit's job names stay, whatever their age: a job in a queue may start tomorrow, one that follows another
# next week.
named=$(cat "$base"/units/*/*/job.sh "$base"/units/*/*/next/*/job.sh "$base"/adopted/*/*/start.sh 2>/dev/null | grep -o 'env/rel/[0-9a-f]*' | sort -u)
n=0
for old in $(ls -t "$env/rel" 2>/dev/null); do
  n=$((n + 1))
  [ $n -le "$keep" ] && continue
  case $old in *[!0-9a-f]*) continue ;; esac
  [ "$old" = "$release" ] && continue
  if printf '%s\n' "$named" | grep -qx "env/rel/$old"; then echo "kept $old"; continue; fi
  mv "$env/rel/$old" "$in/old.$old" && echo "removed $old"
done
rm -rf "$in"
exit 0
