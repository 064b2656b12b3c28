"""A relay that runs in a machine, as a test holds it."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.testbed.state import BedError

SCRIPT = Path(__file__).parent / "relay.py"


class RelayHandle:
    """`host`, `port`: where to connect. set(): another weather for all its connections, from now on."""

    def __init__(
        self,
        start: Callable[..., subprocess.Popen[str]],
        listen: tuple[str, int],
        to: tuple[str, int],
        settings: dict[str, float],
    ) -> None:
        ends = [listen[0], str(listen[1]), to[0], str(to[1])]
        command = [sys.executable, str(SCRIPT), *ends, json.dumps(settings)]
        self._process = start(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.host = listen[0]
        self.port = int(self._answer())

    def _answer(self) -> str:
        line = self._process.stdout.readline().strip() if self._process.stdout else ""
        if not line:
            self.close()
            raise BedError(f"the relay ended with exit status {self._process.returncode}")
        return line

    def set(self, **settings: float) -> None:
        """Any of relay.Weather's fields; returns when they hold."""
        if self._process.stdin:
            self._process.stdin.write(json.dumps(settings) + "\n")
            self._process.stdin.flush()
        self._answer()

    def close(self) -> None:
        self._process.kill()
        self._process.wait(timeout=10)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
