"""Whether a bed can run here, and what to do where it cannot."""

import os
import shutil
import subprocess
import sys

PROGRAMS = ["slurmctld", "slurmd", "sbatch", "slurmdbd", "mariadbd", "munged", "sshd", "ssh", "nft", "ip"]
PROGRAMS += ["nsenter", "unshare", "setpriv"]
# What a container may forbid although we are root in it: namespaces, bridges, cables, NAT, device files.
PROBE = """
set -e
ip link add ftprobe type bridge
ip link add ftprobe0 type veth peer name ftprobe1
printf 'table ip ft {\\n chain c { type nat hook postrouting priority 100; masquerade\\n }\\n}\\n' | nft -f -
mount -t tmpfs tmpfs /mnt
mknod /mnt/device c 1 3
"""


def missing() -> str | None:
    """Why a bed cannot run here, with the remedy; None where it can."""
    if sys.platform != "linux":
        return "it needs Linux"
    if os.geteuid() != 0:
        return "it needs root, for network namespaces: run as root"
    absent = [program for program in PROGRAMS if not shutil.which(program)]
    if absent:
        return f"{', '.join(absent)} missing: run `bash .ci/test-packages` as root (and have /usr/sbin on PATH)"
    probe = ["unshare", "--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "bash", "-c", PROBE]
    done = subprocess.run(probe, capture_output=True, text=True, check=False, timeout=20, stdin=subprocess.DEVNULL)
    if done.returncode:
        return f"this machine forbids what it needs ({done.stderr.strip()}): run on a host or in a privileged container"
    return None
