# What a site is: sections for `discovery.facts`. `@end` comes last, so what was cut off is seen. Reads only.
export SLURM_TIME_FORMAT=%s LC_ALL=C
has() { command -v "$1" >/dev/null 2>&1; }
echo @now; date +%s
echo @host; hostname; id -un
echo @machine; uname -sm; getconf GNU_LIBC_VERSION 2>/dev/null
echo @cpus; nproc 2>/dev/null || getconf _NPROCESSORS_ONLN
echo @memory; sed -n 's/^MemTotal: *//p' /proc/meminfo
echo @gpus; has nvidia-smi && nvidia-smi -L 2>/dev/null
echo @pythons
for p in python3.13 python3.12 python3.11 python3; do
  has $p && $p -c 'import sys; print("%d.%d" % sys.version_info[:2], sys.executable)' 2>/dev/null
done
if has sinfo; then
  echo @version; sinfo --version
  echo @sinfo
  sinfo --local -h -e -o '%R|%a|%l|%D|%c|%m|%G|%f' || { echo @failed; sinfo --local -h 2>&1 >/dev/null | head -n 3; }
  echo @states; sinfo --local -h -o '%R|%D|%t'
  echo @partitions; scontrol -o show partition
  echo @config; scontrol show config 2>/dev/null | grep -E '^(ClusterName|PreemptType|PreemptMode|AccountingStorage(Type|Enforce)|DefMemPer[A-Za-z]*) '
  echo @associations; sacctmgr -nP show assoc where user="$(id -un)" format=cluster,account,partition,qos,defaultqos 2>/dev/null
  echo @account; sacctmgr -nP show user "$(id -un)" format=defaultaccount 2>/dev/null
  echo @reservations; scontrol -o show reservation 2>/dev/null
fi
echo @end
