"""What goes to a compute node is what the `agent` extra says, and nothing more."""

import json
import re
import subprocess
import sys
from importlib import metadata

# bcrypt is hidden, as on a compute node: cryptography takes it where it is (Fabric brings it), and does without.
CODE = """
import json, sys
sys.modules["bcrypt"] = None
import fabrictool.agent.__main__, fabrictool.mesh.transport.node
del sys.modules["bcrypt"]
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


def closure(extra):
    """Distributions that an extra brings, by name."""
    found, todo = (
        set(),
        [
            re.split(r"[ ;<>=!~\[]", line, maxsplit=1)[0]
            for line in metadata.requires("fabrictool")
            if re.search(rf"extra == ['\"]{extra}['\"]", line)
        ],
    )
    while todo:
        name = todo.pop().lower().replace("_", "-")
        if name in found or name == "fabrictool":
            continue
        try:
            requires = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue  # a marker of another platform
        found.add(name)
        todo += [re.split(r"[ ;<>=!~\[(]", line, maxsplit=1)[0] for line in requires if "extra ==" not in line]
    return found


def test_the_agent_imports_nothing_outside_its_extra():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    owners = metadata.packages_distributions()
    loaded = {d.lower().replace("_", "-") for module in json.loads(done.stdout) for d in owners.get(module, [])}
    at_start = {"fabrictool", "setuptools"}  # setuptools hooks itself into every interpreter of its environment
    assert loaded - closure("agent") <= at_start
    assert {"aiohttp", "cryptography", "msgspec"} <= loaded
