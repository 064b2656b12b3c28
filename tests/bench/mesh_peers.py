"""Measures the others in the same run: kinship, in an environment of its own (`tests/bench/peers/install`)."""

import json
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
INTERPRETER = ROOT / "build" / "peers" / "bin" / "python"
INSTALLED = ROOT / "build" / "peers" / ".ready"
LOG = ROOT / "build" / "peers.log"
WITHIN_S = 900.0


def kinship():
    """Its figures, or why there are none."""
    if not INSTALLED.exists():
        lines = LOG.read_text().strip().splitlines() if LOG.exists() else []
        return {"not_measured": lines[-1] if lines else "it is not installed: run `make bench-mesh`"}
    program = Path(__file__).parent / "peers" / "kinship_members.py"
    try:
        done = subprocess.run(
            [INTERPRETER, program], capture_output=True, text=True, timeout=WITHIN_S, check=True, cwd=ROOT
        )
    except subprocess.TimeoutExpired:
        return {"not_measured": f"it did not end within {WITHIN_S:.0f} s"}
    except subprocess.CalledProcessError as error:
        return {"not_measured": (error.stderr.strip().splitlines() or [f"it ended with {error.returncode}"])[-1]}
    return json.loads(done.stdout)
