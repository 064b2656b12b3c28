"""Two hundred replicas on the testbed's Slurm: apply against one SSH connection for every command. Needs root.

Both place the same run folders and submit the same jobs on the same login node; no job starts, because the nodes are
reserved. Connections are counted in sshd's log, commands by the controller (`sdiag`).
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.bed.federation import Federation
from tests.bed.test_many_replicas import COUNT, calls, grown, logins
from tests.clusters.submit_bench import archive
from tests.testbed.bed import Bed
from tests.testbed.requirements import missing


def measured(bed, work):
    """Seconds, connections and requests to the controller."""
    before, connections, begun = calls(bed), logins(bed), time.monotonic()
    work()
    seconds = time.monotonic() - begun
    return seconds, logins(bed) - connections, grown(before, calls(bed))


def one_by_one(bed):
    """What a script does: for each replica one `ssh` that places files, and one that submits."""
    for number in range(COUNT):
        operation = f"replica-naive-{number}-g1-00000000"
        place = f"mkdir -p naive && tar -x -f - -C naive && chmod -R go= naive/{operation}"
        command = ["ssh", "-F", str(bed.ssh_config), "a-login", place]
        subprocess.run(bed.operator_command(command, "/"), input=archive([operation]), check=True, capture_output=True)
        command = ["ssh", "-F", str(bed.ssh_config), "a-login", f"sh naive/{operation}/submit"]
        subprocess.run(bed.operator_command(command, "/"), check=True, capture_output=True)


class ColdCommandLine:
    """A process for each command, as users have it: its start counts."""

    def __init__(self, bed):
        self._bed = bed

    def run(self, arguments, *, kill_after=None, **options):
        assert kill_after is None
        return self._bed.operator_run([sys.executable, "-m", "fabrictool.cli.main", *arguments], **options)


def main(_argv=None):
    """Print the table."""
    if reason := missing():
        print(f"not run: {reason}")
        return
    bed = Bed.up(owned=True)
    try:
        bed.maintenance("a", 1, 3600)
        folder = Path(tempfile.mkdtemp(prefix="ft-bench-"))
        fed = Federation(bed, folder, "/nowhere/tiny.gguf", "bench", ColdCommandLine(bed))
        cpu = {"device": "cpu", "nodes": COUNT, "memory_per_node": "4 GiB", "walltime": "60m"}
        models = {"tiny": {"replicas": {"min": COUNT, "max": COUNT}}}
        fed.write({"a": fed.cluster("a", {"normal": cpu})}, models, gateway=None, tenants=None)
        fed.run("trust", "init")
        fed.run("plan", "-o", "p.plan")
        rows = [("apply, a saved plan", *measured(bed, lambda: fed.run("apply", "p.plan", "--yes", "--no-wait")))]
        rows.append(("plan, all of it there", *measured(bed, lambda: fed.run("plan"))))
        rows.append(("destroy", *measured(bed, lambda: fed.run("destroy", "--yes"))))
        rows.append((f"ssh, {2 * COUNT} connections", *measured(bed, lambda: one_by_one(bed))))
    finally:
        bed.down()
    print(f"{COUNT} replicas               seconds  connections  sbatch  squeue")
    for name, seconds, connections, asked in rows:
        looks = asked.get("REQUEST_JOB_INFO", 0) + asked.get("REQUEST_JOB_USER_INFO", 0)
        batches = asked.get("REQUEST_SUBMIT_BATCH_JOB", 0)
        print(f"{name:<24} {seconds:9.1f}  {connections:11}  {batches:6}  {looks:6}")
    print(f"apply takes {rows[0][1] / rows[-1][1]:.2f} of the script's time")


if __name__ == "__main__":
    main()
