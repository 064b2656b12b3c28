"""A real `llama-server`, built from source once for this machine."""

import os
import subprocess
import sys
from pathlib import Path


def built():
    """Path of the program; minutes where it is not there yet."""
    script = Path(__file__).with_name("build_llama_server.sh")
    run = subprocess.run(
        [script], env=os.environ | {"PYTHON": sys.executable}, stdout=subprocess.PIPE, text=True, check=True
    )
    return run.stdout.strip().splitlines()[-1]
