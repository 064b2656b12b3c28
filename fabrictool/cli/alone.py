"""``gateway run``, as a program that has read no command line: the parser and all commands take 14 MB, and a gateway
runs for months.

Next to nothing is imported before it listens to Ctrl-C, as in `cli.main`.
"""

from __future__ import annotations

import os
import sys

from fabrictool.cli.exits import answered
from fabrictool.cli.interrupts import HoldingInterrupts, leave

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

_PROGRAM = "import sys; sys.path.insert(0, sys.argv[1]); from fabrictool.cli.alone import main; main(sys.argv[2])"
_NAME = ("fabrictool", "gateway", "run")
"""For who looks at the list of processes."""


class AloneGateway:
    """The options of the command, which has looked at them: numbers, texts and names of files."""

    # Wide: what the command line has.
    def __init__(
        self,
        registry: str,
        host: str,
        port: int,
        keys: str | None,
        policy: str,
        retries: int,
        tls: tuple[str, str] | None,
        records: str | None,
    ) -> None:
        """`tls`: the files of its certificate and of the certificate's key."""
        self._options = (registry, host, port, keys, policy, retries, tls, records)
        self._files = (registry, *((keys,) if keys else ()), *(tls or ()))

    def run(self) -> int:
        """Serve, as a program of its own in this process; here, where a file can be read only once, such as a pipe."""
        if all(map(os.path.isfile, self._files)):
            self._become()
        return self.serve()

    def _become(self) -> NoReturn:
        import json
        from pathlib import Path

        for stream in (sys.stdout, sys.stderr):
            if stream is not None:  # closed by whoever started us
                stream.flush()
        package = str(Path(__file__).resolve().parents[2])
        # In ASCII, with what no text can hold escaped: the name of a file may be any octets.
        options = json.dumps(self._options)
        with HoldingInterrupts():  # the next program lets them through when it listens
            os.execv(sys.executable, [sys.executable, "-P", "-c", _PROGRAM, package, options, *_NAME])  # noqa: S606 - ourselves

    def serve(self) -> int:
        """Until TERM or Ctrl-C; raises what `run_on_list` does."""
        from pathlib import Path

        from fabrictool.base.clock import SystemClock
        from fabrictool.base.logs import configure_logging
        from fabrictool.base.settings import Settings
        from fabrictool.cli.output import say
        from fabrictool.gateway.clienttls import ClientTls
        from fabrictool.gateway.keys import read_keys
        from fabrictool.gateway.loop import run_loop
        from fabrictool.gateway.runlist import run_on_list
        from fabrictool.gateway.staticlist import read_registry

        registry, host, port, keys, policy, retries, tls, records = self._options
        nodes = read_registry(Path(registry))
        keyring = None if keys is None else read_keys(Path(keys))
        configure_logging(Settings.from_environment().log_level)
        if keyring is None:
            say("no --keys: every request is answered")
        scheme = "http" if tls is None else "https"
        run_loop(
            run_on_list(
                nodes,
                SystemClock(),
                host=host,
                port=port,
                keyring=keyring,
                policy_name=policy,
                retries=retries,
                tls=None if tls is None else ClientTls(*tls),
                records=None if records is None else Path(records),
                ready=lambda at: say(f"serving {scheme}://{at}/v1 from {len(nodes.nodes)} nodes; Ctrl-C ends"),
            )
        )
        return 0


def main(options: str) -> NoReturn:
    """With the options that `AloneGateway.run` hands over."""

    def serve() -> int:
        import json

        return AloneGateway(*json.loads(options)).serve()

    leave(answered(serve, as_json=False))
