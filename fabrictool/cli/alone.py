"""``gateway run``, as a program that has read no command line: the parser and all commands take 14 MB, and a gateway
runs for months.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from fabrictool.cli.exits import answered

if TYPE_CHECKING:
    from typing import NoReturn


class AloneGateway(msgspec.Struct, frozen=True):
    """The options of the command, which has looked at them."""

    registry: str
    host: str
    port: int
    keys: str | None
    policy: str
    retries: int
    tls: tuple[str, str] | None
    """The files of its certificate and of the certificate's key."""
    records: str | None

    def become(self) -> NoReturn:
        """Go on as the program that serves so, in this process."""
        sys.stdout.flush()
        sys.stderr.flush()
        options = msgspec.json.encode(self).decode()
        os.execv(sys.executable, [sys.executable, "-P", "-m", "fabrictool.cli.alone", options])  # noqa: S606 - ourselves

    def serve(self) -> int:
        """Until TERM or Ctrl-C; raises what `run_on_list` does."""
        from fabrictool.base.clock import SystemClock
        from fabrictool.base.logs import configure_logging
        from fabrictool.base.settings import Settings
        from fabrictool.cli.output import say
        from fabrictool.gateway.clienttls import ClientTls
        from fabrictool.gateway.keys import read_keys
        from fabrictool.gateway.loop import run_loop
        from fabrictool.gateway.runlist import run_on_list
        from fabrictool.gateway.staticlist import read_registry

        nodes = read_registry(Path(self.registry))
        keyring = None if self.keys is None else read_keys(Path(self.keys))
        configure_logging(Settings.from_environment().log_level)
        if keyring is None:
            say("no --keys: every request is answered")
        scheme = "http" if self.tls is None else "https"
        run_loop(
            run_on_list(
                nodes,
                SystemClock(),
                host=self.host,
                port=self.port,
                keyring=keyring,
                policy_name=self.policy,
                retries=self.retries,
                tls=None if self.tls is None else ClientTls(*self.tls),
                records=None if self.records is None else Path(self.records),
                ready=lambda at: say(f"serving {scheme}://{at}/v1 from {len(nodes.nodes)} nodes; Ctrl-C ends"),
            )
        )
        return 0


if __name__ == "__main__":
    sys.exit(answered(msgspec.json.decode(sys.argv[1], type=AloneGateway).serve, as_json=False))
