"""`top` in a terminal of its own, on the operator's machine."""

import contextlib
import os
import pty
import termios
import threading

import msgspec

from fabrictool.status.sightings import Sighting


class Terminal:
    """What it sees is recorded."""

    def __init__(self, fed, *words):
        self._fed, self.record = fed, fed.folder / "seen.ndjson"
        self.record.unlink(missing_ok=True)
        self._looks, self._read = [], 0
        self._keys, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (36, 120))
        self.process = fed.bed.operator_popen(
            fed.command("top", *words, "--record", str(self.record)),
            env=fed.environment | {"TERM": "xterm-256color"}, cwd=fed.folder,
            stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        self._reader = threading.Thread(target=self._drain, daemon=True)
        self._reader.start()

    def _drain(self):
        """A terminal that nobody reads stops who writes to it."""
        with contextlib.suppress(OSError):  # it has ended
            while os.read(self._keys, 65536):
                pass

    def looks(self):
        """All that was recorded so far."""
        if self.record.exists():
            with self.record.open("rb") as file:
                file.seek(self._read)
                whole, newline, _ = file.read().rpartition(b"\n")
            self._read += len(whole + newline)
            self._looks += [msgspec.json.decode(line, type=Sighting) for line in whole.splitlines()]
        return self._looks

    def end(self):
        """By Ctrl-C; its exit status."""
        os.write(self._keys, b"\x03")
        try:
            self._fed.wait("it does not end", lambda: self.process.poll() is not None)
        finally:
            self.process.kill()
            self._reader.join(10)
            os.close(self._keys)
        return self.process.wait()
