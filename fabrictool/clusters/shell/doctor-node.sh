# Runs in a job, in the folder doctor/TOKEN; arguments: the gateways' addresses for agents, HOST:PORT with commas between
# ("-": none), then Python's words. What the inventory promises lies in `promised`, a kind and what it is a line. Writes
# `result`, whole or not at all.
hubs=$1; shift
{
  echo @host; hostname
  echo @shared; cat from-login
  echo @locks; command -v flock >/dev/null 2>&1 && { flock -n lock true && echo "flock works" || echo "flock fails"; }
  echo @gpu; echo "visible ${CUDA_VISIBLE_DEVICES:-${ROCR_VISIBLE_DEVICES:-${ZE_AFFINITY_MASK:-}}}"
  command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null
  echo @promised
  while IFS= read -r line; do
    kind=${line%% *} what=${line#* }
    case $kind in
      path) [ -e "$what" ] ;;
      program) command -v "$what" >/dev/null ;;
      module) ( command -v module >/dev/null 2>&1 || . /etc/profile; module load "$what" ) >/dev/null 2>&1 ;;
      interface) [ -e "/sys/class/net/$what" ] ;;
      interfaces) for i in "/sys/class/net/$what"*; do [ -e "$i" ] && break; done; [ -e "$i" ] ;;
      submission) sh -c "$what" >/dev/null 2>&1 </dev/null ;;
      adapter) [ -n "$(ls "/sys/class/$what" 2>/dev/null)" ] ;;
    esac && printf 'there %s\n' "$line" || printf 'missing %s\n' "$line"
  done <promised
  echo @python
  if [ $# -gt 0 ]; then
    "$@" -P -c 'import platform, fabrictool, fabrictool.agent.__main__
print("runs", fabrictool.__version__, platform.python_version(), platform.machine())' 2>&1 | tail -n 1
    echo @egress
    [ "$hubs" = - ] || "$@" -P -c 'import socket, sys
for hub in sys.argv[1].split(","):
    host, _, port = hub.rpartition(":")
    try:
        socket.create_connection((host, int(port)), 10).close()
        print(hub, "connected")
    except ConnectionRefusedError:
        print(hub, "refused")
    except Exception as error:
        print(hub, "failed", str(error) or type(error).__name__)' "$hubs" 2>/dev/null
  fi
  echo @end
} >result.new 2>/dev/null
mv result.new result
