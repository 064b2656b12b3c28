"""Keys of the testbed: host keys, the operator's key, and the authorities that sign both kinds."""

import subprocess
from pathlib import Path


def make_key(path: Path, comment: str = "") -> Path:
    """A new ed25519 key without a passphrase; the public half lies beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["ssh-keygen", "-qt", "ed25519", "-N", "", "-C", comment, "-f", str(path)], check=True)
    return path


def public(path: Path) -> str:
    """`ssh-ed25519 AAAA...`, without the comment."""
    return " ".join(Path(f"{path}.pub").read_text().split()[:2])


def sign(authority: Path, key: Path, *, identity: str, principals: list[str], valid: str, host: bool = False) -> Path:
    """Writes `key`-cert.pub and returns it. `valid` is ssh-keygen's -V, such as "-5m:+1h"."""
    command = ["ssh-keygen", "-q", "-s", str(authority), "-I", identity, "-n", ",".join(principals), "-V", valid]
    subprocess.run([*command, *(["-h"] if host else []), f"{key}.pub"], check=True)
    return Path(f"{key}-cert.pub")
