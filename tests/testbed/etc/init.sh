#!/bin/bash
# PID 1 of one machine: makes its own view of the file system, starts its services, reaps orphans.
# Environment: BED NAME ROLE CLUSTER ACCOUNTING ACCOUNTS HOSTS SSH_PORTS GPUS EXPOSE (paths, one a line)
set -u
cd /
hostname "$NAME"
MACHINE=$BED/m/$NAME
. "$BED/etc/services.sh"

bind() { mount --bind "$1" "$2"; }
fresh() { mount -t tmpfs -o "mode=$1,size=256m" tmpfs "$2"; }
open_to_all() { (( 8#$(stat -c %a "$1") & 1 )); }

# Users of this machine must reach the repository and its Python at their usual paths, even below a folder that is
# closed to them or that a mount of ours hides. Nothing is changed outside of this mount namespace.
expose() {
  local kept=$1 path=$2 at= part parts child
  IFS=/ read -ra parts <<<"${path#/}"
  for part in "${parts[@]}"; do
    at+=/$part
    [ -d "$at" ] || break
    if ! open_to_all "$at"; then fresh 755 "$at"; break; fi
  done
  [ "$path" -ef "$kept" ] && return
  mkdir -p "$path"
  if open_to_all "$kept"; then mount --rbind "$kept" "$path"; return; fi
  for child in "$kept"/* "$kept"/.[!.]*; do
    if [ -L "$child" ]; then cp -P "$child" "$path/"
    elif [ -d "$child" ]; then mkdir -p "$path/${child##*/}"; mount --rbind "$child" "$path/${child##*/}"
    elif [ -f "$child" ]; then : >"$path/${child##*/}"; bind "$child" "$path/${child##*/}"; fi
  done
}

bind "$HOSTS" /etc/hosts
bind "$BED/resolv.conf" /etc/resolv.conf
bind "$BED/nsswitch.conf" /etc/nsswitch.conf

if [ "$ROLE" != operator ] && [ "$ROLE" != router ]; then
  fresh 755 /run
  mkdir -p /run/kept /run/munge /run/sshd /run/mysqld /run/slurm /run/fakegpu /run/services
  chmod 700 /run/kept
  chown munge: /run/munge
  chown mysql: /run/mysqld
  mapfile -t paths <<<"$EXPOSE"
  for i in "${!paths[@]}"; do mkdir "/run/kept/$i"; mount --rbind "${paths[i]}" "/run/kept/$i"; done
  for file in passwd group shadow; do bind "$ACCOUNTS/$file" "/etc/$file"; done
  bind "$ACCOUNTS/home" /home
  fresh 1777 /tmp
  fresh 1777 /dev/shm
  [ -n "$SSH_PORTS" ] && bind "$MACHINE/ssh" /etc/ssh
  if [ -n "$CLUSTER" ]; then
    mkdir -p /etc/slurm /etc/munge /var/log/slurm /var/spool/slurmd /var/lib/slurm
    bind "$BED/$CLUSTER/slurm" /etc/slurm
    bind "$BED/$CLUSTER/munge" /etc/munge
    chown slurm: "$MACHINE/state" "$MACHINE/log"
    bind "$MACHINE/state" /var/lib/slurm
    bind "$MACHINE/log" /var/log/slurm
    bind "$MACHINE/spool" /var/spool/slurmd
    [ "$ROLE" = controller ] && chown mysql: "$MACHINE/mysql" && bind "$MACHINE/mysql" /var/lib/mysql
  fi
  for i in "${!paths[@]}"; do expose "/run/kept/$i" "${paths[i]}"; done
fi

for port in $SSH_PORTS; do start "sshd-$port"; done
[ -n "$CLUSTER" ] && start munged
case $ROLE in
  controller)
    if [ "$ACCOUNTING" = slurmdbd ]; then start mariadbd; start slurmdbd; name_cluster; fi
    start slurmctld
    [ "$ACCOUNTING" = slurmdbd ] && name_users ;;
  node)
    # Character devices: with plain files CUDA_VISIBLE_DEVICES would stay empty.
    for ((i = 0; i < GPUS; i++)); do mknod -m 666 "/run/fakegpu/nvidia$i" c 1 3; done
    start slurmd ;;
esac
: >"$MACHINE/ready"

trap 'exit 0' TERM
sleep infinity &
while :; do wait -n; [ -z "$(jobs -r)" ] && break; done
