# What an environment can be made of, and what is there; arguments: an environment module or "", then Pythons to try.
# Reads only.
module=$1; shift
echo @base; echo "$base"
echo @machine; uname -m; getconf GNU_LIBC_VERSION 2>/dev/null
echo @space
d=$base; while [ ! -d "$d" ]; do d=$(dirname "$d"); done
df -Pk "$d" | tail -n 1 | awk '{ print $4 }'
echo @pythons
if [ -n "$module" ]; then
  command -v module >/dev/null 2>&1 || . /etc/profile
  module load "$module" >/dev/null 2>&1 || echo "the module $module cannot be loaded"
fi
for p; do
  case $p in "~/"*) p=$HOME/${p#??} ;; esac
  command -v "$p" >/dev/null 2>&1 || continue
  "$p" -c 'import sys, platform, sysconfig
print("|".join(["%d.%d" % sys.version_info[:2], platform.python_implementation(), str(sysconfig.get_config_var("SOABI")), platform.machine(), "-".join(platform.libc_ver()), platform.python_version(), sys.executable]))' 2>/dev/null
done
echo @current; readlink "$base/env/current" 2>/dev/null
echo @releases; ls "$base/env/rel" 2>/dev/null
echo @end
