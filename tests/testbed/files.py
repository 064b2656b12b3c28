"""Writes a bed's folder: accounts, keys, configurations of Slurm and sshd, the operator's SSH files."""

import grp
import os
import pwd
import secrets
import shutil
from pathlib import Path
from string import Template

from tests.testbed import keys
from tests.testbed.topology import CLUSTERS, GPUS, NODES, NOISY_PORT, Cluster, MachineSpec, User, address, hosts_file

ETC = Path(__file__).parent / "etc"
ACCOUNTING = {
    "slurmdbd": "AccountingStorageType=accounting_storage/slurmdbd\nAccountingStorageHost={cluster}-ctl\n"
    "AccountingStorageTRES=gres/gpu\nAccountingStoreFlags=job_comment\nJobCompType=jobcomp/none",
    "filetxt": "AccountingStorageType=accounting_storage/none\nJobCompType=jobcomp/filetxt\n"
    "JobCompLoc=/var/log/slurm/jobcomp.txt",
}
OPERATOR_KEY, USER_CA, HOST_CA = "operator_key", "user_ca", "host_ca"


def fill(template: str, **values: object) -> str:
    return Template((ETC / template).read_text()).substitute({key: str(value) for key, value in values.items()})


def accounts_folder(root: Path, spec: MachineSpec) -> Path:
    """Users and homes: the machines of a cluster share theirs, every other machine has its own."""
    return root / "accounts" / (spec.cluster or spec.name)


def write_all(root: Path, specs: dict[str, MachineSpec]) -> None:
    (root / "etc").mkdir()
    for script in ("init.sh", "services.sh"):
        shutil.copy(ETC / script, root / "etc")
    (root / "resolv.conf").write_text("# no DNS here\n")
    (root / "nsswitch.conf").write_text("passwd: files\ngroup: files\nshadow: files\nhosts: files\n")
    for view in ("pub", *CLUSTERS):
        (root / f"hosts.{view}").write_text(hosts_file(view))
    for name in (OPERATOR_KEY, USER_CA, HOST_CA):
        keys.make_key(root / name, name)
    for cluster in CLUSTERS.values():
        _cluster(root, cluster)
    for spec in specs.values():
        for folder in ("log", "spool", "state", "mysql", "ssh"):
            (root / "m" / spec.name / folder).mkdir(parents=True)
        if spec.users and not (accounts := accounts_folder(root, spec)).exists():
            _accounts(accounts, spec.users, keys.public(root / OPERATOR_KEY))
        if spec.ssh_ports:
            _sshd(root, spec)
    _operator(root, specs)


def _accounts(folder: Path, users: tuple[User, ...], authorized: str) -> None:
    (folder / "home").mkdir(parents=True)
    lines = {
        "passwd": [f"{u.name}:x:{u.uid}:{u.uid}::/home/{u.name}:/bin/bash" for u in users],
        "group": [f"{u.name}:x:{u.uid}:" for u in users],
        "shadow": [f"{u.name}:*:19000:0:99999:7:::" for u in users],  # "!" would lock them out of sshd
    }
    for name, added in lines.items():
        (folder / name).write_text(Path("/etc", name).read_text().rstrip("\n") + "\n" + "\n".join(added) + "\n")
    os.chown(folder / "shadow", 0, grp.getgrnam("shadow").gr_gid)
    (folder / "shadow").chmod(0o640)
    for user in users:
        home = folder / "home" / user.name
        (home / ".ssh").mkdir(parents=True)
        (home / ".ssh" / "authorized_keys").write_text(f"{authorized} operator\n")
        if user.name == "noisy":
            for startup in (".bashrc", ".bash_profile"):
                shutil.copy(ETC / "noisy_shell", home / startup)
        for path in (home, *home.rglob("*")):
            os.chown(path, user.uid, user.uid)
        home.chmod(0o700)
        (home / ".ssh").chmod(0o700)


def _cluster(root: Path, cluster: Cluster) -> None:
    slurm, munge = root / cluster.name / "slurm", root / cluster.name / "munge"
    slurm.mkdir(parents=True)
    munge.mkdir(mode=0o700)
    key = munge / "munge.key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)
    owner = pwd.getpwnam("munge")
    for path in (munge, key):
        os.chown(path, owner.pw_uid, owner.pw_gid)
    values = {"cluster": cluster.name, "nodes": NODES, "gpu": cluster.gpu, "gpus": GPUS}
    accounting = ACCOUNTING[cluster.accounting].format(cluster=cluster.name)
    (slurm / "slurm.conf").write_text(fill("slurm.conf.in", accounting=accounting, **values))
    (slurm / "gres.conf").write_text(
        f"NodeName={cluster.name}-n[1-{NODES}] Name=gpu Type={cluster.gpu} File=/run/fakegpu/nvidia[0-{GPUS - 1}]\n"
    )
    (slurm / "cgroup.conf").write_text(
        "CgroupPlugin=cgroup/v1\nConstrainCores=no\nConstrainDevices=no\nConstrainRAMSpace=no\n"
    )
    database = slurm / "slurmdbd.conf"
    database.write_text(fill("slurmdbd.conf.in", cluster=cluster.name))
    owner = pwd.getpwnam("slurm")
    os.chown(database, owner.pw_uid, owner.pw_gid)
    database.chmod(0o600)


def _sshd(root: Path, spec: MachineSpec) -> None:
    folder = root / "m" / spec.name / "ssh"
    shutil.copy(root / f"{USER_CA}.pub", folder / "user_ca.pub")
    shutil.copy(ETC / "banner", folder)
    for port in spec.ssh_ports:
        text = fill("sshd_common.in", port=port)
        if port == 22:
            text += fill("sshd_roomy.in")
        if port == NOISY_PORT:
            text += fill("sshd_noisy.in")
        key = keys.make_key(folder / f"host_key_{port}", f"{spec.name}:{port}")
        if spec.name == "host":
            names = [address(spec), spec.name]
            keys.sign(root / HOST_CA, key, identity=spec.name, principals=names, valid="-1h:+1w", host=True)
            text += f"HostCertificate /etc/ssh/host_key_{port}-cert.pub\n"
        (folder / f"sshd_config_{port}").write_text(text)


def _operator(root: Path, specs: dict[str, MachineSpec]) -> None:
    known, config = [], []
    for spec in specs.values():
        for port in spec.ssh_ports:
            names = [address(spec), spec.name]
            at = ",".join(names if port == 22 else [f"[{name}]:{port}" for name in names])
            known.append(f"{at} {keys.public(root / 'm' / spec.name / 'ssh' / f'host_key_{port}')}\n")
        if spec.ssh_ports:
            config.append(
                f"Host {spec.name} {address(spec)}\n  HostName {address(spec)}\n  User {spec.users[0].name}\n"
            )
    (root / "known_hosts").write_text("".join(known))
    common = {
        "IdentityFile": root / OPERATOR_KEY,
        "IdentitiesOnly": "yes",
        "UserKnownHostsFile": root / "known_hosts",
        "GlobalKnownHostsFile": "/dev/null",
        "StrictHostKeyChecking": "yes",
        "ForwardAgent": "no",
        "BatchMode": "yes",
        "ConnectTimeout": "5",
        "ServerAliveInterval": "15",
    }
    lines = [f"  {key} {value}\n" for key, value in common.items()]
    (root / "ssh_config").write_text("".join(config) + "Host *\n" + "".join(lines))
