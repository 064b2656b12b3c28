# Runs in a job, in the folder doctor/TOKEN; arguments: host and port of the gateway's mesh ("-": none), then Python's
# words. Writes `result`, whole or not at all.
host=$1; port=$2; shift 2
{
  echo @host; hostname
  echo @shared; cat from-login
  echo @locks; command -v flock >/dev/null 2>&1 && { flock -n lock true && echo "flock works" || echo "flock fails"; }
  echo @gpu; echo "visible ${CUDA_VISIBLE_DEVICES:-${ROCR_VISIBLE_DEVICES:-${ZE_AFFINITY_MASK:-}}}"
  command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null
  echo @python
  if [ $# -gt 0 ]; then
    "$@" -P -c 'import platform, fabrictool, fabrictool.agent.__main__
print("runs", fabrictool.__version__, platform.python_version(), platform.machine())' 2>&1 | tail -n 1
    echo @egress
    [ "$host" = - ] || "$@" -P -c 'import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), 10).close()
    print("connected")
except ConnectionRefusedError:
    print("refused")
except Exception as error:
    print("failed", str(error) or type(error).__name__)' "$host" "$port" 2>&1 | tail -n 1
  fi
  echo @end
} >result.new 2>/dev/null
mv result.new result
