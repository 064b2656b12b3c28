"""python -m tests.testbed up | down | status | shell MACHINE | exec MACHINE CMD... | kill MACHINE | boot MACHINE |
cut MACHINE[:INTERFACE] | mend MACHINE[:INTERFACE] | maintenance CLUSTER MINUTES [LENGTH]"""

import subprocess
import sys
from collections.abc import Callable

from tests.testbed.bed import Bed
from tests.testbed.requirements import missing
from tests.testbed.state import BedError
from tests.testbed.topology import CLUSTERS


def _up() -> None:
    if reason := missing():
        raise BedError(reason)
    bed = Bed.up()
    print("up: " + ", ".join(f"{step} {seconds:.1f} s" for step, seconds in bed.times.items()))
    print(f"ssh -F {bed.ssh_config} works from op: python -m tests.testbed shell op")


def _down() -> None:
    try:
        seconds = Bed.attach().down()
    except BedError:
        print("removed the remains of a testbed" if Bed.end_all() else "no testbed is up")
        return
    print(f"down: {seconds:.1f} s")


def _status() -> int:
    bed = Bed.attach()
    print(f"folder {bed.root}")
    for name, spec in bed.specs.items():
        machine = bed.machine(name)
        power = f"pid {machine.process.pid}" if machine.alive else "no power"
        print(f"  {name:8} {power:12} {' '.join(i.address for i in spec.interfaces)}")
    for cluster in CLUSTERS:
        states = ", ".join(f"{node} {state}" for node, state in bed.node_states(cluster).items())
        print(f"  cluster {cluster}: {states or 'the controller does not answer'}")
    return 0


def _exec(name: str, *argv: str) -> int:
    bed = Bed.attach()
    command = bed.operator_command(argv) if name == "op" else bed.machine(name).command(argv)
    return subprocess.run(command, check=False).returncode


def _shell(name: str) -> int:
    return _exec(name, "bash", "--norc", "-i")


def _link(text: str) -> tuple[str, int]:
    name, _, index = text.partition(":")
    return name, int(index or 0)


def _maintenance(cluster: str, minutes: str, length: str = "10") -> None:
    print(Bed.attach().maintenance(cluster, float(minutes) * 60, float(length) * 60))


COMMANDS: dict[str, Callable[..., int | None]] = {
    "up": _up,
    "down": _down,
    "status": _status,
    "shell": _shell,
    "exec": _exec,
    "kill": lambda name: Bed.attach().power_cut(name),
    "boot": lambda name: Bed.attach().boot(name),
    "cut": lambda link: Bed.attach().cut_link(*_link(link)),
    "mend": lambda link: Bed.attach().mend_link(*_link(link)),
    "maintenance": _maintenance,
}


def main(arguments: list[str]) -> int:
    command = COMMANDS.get(arguments[0]) if arguments else None
    if not command:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        return command(*arguments[1:]) or 0
    except (BedError, TypeError, ValueError) as error:
        print(f"testbed: {error}", file=sys.stderr)
        return 1


sys.exit(main(sys.argv[1:]))
