#!/bin/bash
# Services of one machine. Sourced by init.sh, and run as `services.sh start|stop|kill NAME` inside of the machine.
# Environment: BED NAME CLUSTER

# A database that may lose its last second when its machine loses power.
HASTY=(--innodb-buffer-pool-size=16M --innodb-log-file-size=8M --innodb-flush-log-at-trx-commit=0
  --innodb-flush-method=O_DIRECT_NO_FSYNC --innodb-doublewrite=OFF --performance-schema=OFF)

launch() { # NAME COMMAND...: in the background, its id in /run/services
  local name=$1; shift
  setsid "$@" </dev/null >>"$BED/m/$NAME/log/$name.out" 2>&1 &
  echo $! >"/run/services/$name"
}

wait_for() { # up to 15 s until the command succeeds
  local i
  for ((i = 0; i < 750; i++)); do "$@" >/dev/null 2>&1 && return; sleep 0.02; done
  echo "$NAME: gave up waiting for: $*" >&2
  return 1
}

listens() { exec 3<>"/dev/tcp/$1/$2"; }
in_subshell() { ( "$@" ); }
sql() { mariadb --no-defaults -S /run/mysqld/mysqld.sock "$@"; }

start() {
  cd / || exit # slurmd keeps the folder it was started in
  case $1 in
    sshd-*)
      launch "$1" /usr/sbin/sshd -D -e -f "/etc/ssh/sshd_config_${1#sshd-}"
      wait_for test -s "/run/$1.pid" ;;
    munged)
      launch munged setpriv --reuid=munge --regid=munge --init-groups munged --foreground --num-threads=2 \
        --log-file=/run/munge/munged.log --pid-file=/run/munge/munged.pid --seed-file=/run/munge/seed
      wait_for test -S /run/munge/munge.socket.2 ;;
    mariadbd)
      [ -d /var/lib/mysql/mysql ] || mariadb-install-db --no-defaults --user=mysql --datadir=/var/lib/mysql \
        --skip-test-db --auth-root-authentication-method=socket "${HASTY[@]}" >/var/log/slurm/mysql-install.log 2>&1
      launch mariadbd mariadbd --no-defaults --user=mysql --datadir=/var/lib/mysql --socket=/run/mysqld/mysqld.sock \
        --skip-networking "${HASTY[@]}" --innodb-lock-wait-timeout=900 --key-buffer-size=1M \
        --pid-file=/run/mysqld/mysqld.pid
      wait_for sql -e "SELECT 1"
      sql -e "CREATE USER IF NOT EXISTS slurm@localhost IDENTIFIED VIA unix_socket;
              GRANT ALL ON slurm_acct.* TO slurm@localhost;" ;;
    slurmdbd) launch slurmdbd slurmdbd -D; wait_for in_subshell listens "$NAME" 6819 ;;
    slurmctld) launch slurmctld slurmctld -D -i; wait_for in_subshell listens "$NAME" 6817 ;;
    slurmd) launch slurmd slurmd -D ;;
    *) echo "no service is called $1" >&2; return 2 ;;
  esac
}

name_cluster() { sacctmgr -Qi add cluster "$CLUSTER" >/dev/null 2>&1; }
name_users() {
  sacctmgr -Qi add account proj01 cluster="$CLUSTER"
  sacctmgr -Qi add user "$(ls /home | paste -sd,)" account=proj01 cluster="$CLUSTER"
} >/dev/null 2>&1

stop() { # NAME SIGNAL
  local pid
  pid=$(cat "/run/services/$1") && kill "-$2" "$pid"
  wait_for gone "$pid" || kill -KILL "$pid"
}
gone() { ! kill -0 "$1"; }

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
  case $1 in
    start) start "$2" ;;
    stop) stop "$2" TERM ;;
    kill) stop "$2" KILL ;;
    *) echo "start, stop or kill?" >&2; exit 2 ;;
  esac
fi
