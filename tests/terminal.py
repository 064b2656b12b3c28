"""A program on a terminal of its own, that a test types into."""

import contextlib
import os
import pty
import select
import signal
import termios
import time


class ProgramOnTerminal:
    """It leads its session, so that keys such as Ctrl-C reach it and what it starts."""

    def __init__(self, line, *, cwd, environment, rows=24, columns=80):
        self.seen = ""
        self._looked = 0
        self._pid, self._terminal = pty.fork()
        if not self._pid:
            try:
                termios.tcsetwinsize(0, (rows, columns))
                os.chdir(cwd)
                os.execvpe(line[0], line, environment)  # noqa: S606 - a shell would be another program
            finally:
                os._exit(127)

    def type(self, keys):
        os.write(self._terminal, keys.encode())

    def type_until(self, key, text, within_s=60.0):
        """Press the key again each second until `text` comes."""
        until = time.monotonic() + within_s
        while self.seen.find(text, self._looked) < 0:
            assert time.monotonic() < until, f"no {text!r} in {self.seen!r}"
            self.type(key)
            looked_until = time.monotonic() + 1.0
            while self.seen.find(text, self._looked) < 0 and time.monotonic() < looked_until:
                assert self._read(), f"it ended without {text!r}: {self.seen!r}"

    def wait_for(self, text, within_s=60.0):
        """Read until `text` has come since the last time; returns what came up to it."""
        until = time.monotonic() + within_s
        while (place := self.seen.find(text, self._looked)) < 0:
            assert time.monotonic() < until, f"no {text!r} in {self.seen!r}"
            assert self._read(), f"it ended without {text!r}: {self.seen!r}"
        start, self._looked = self._looked, place + len(text)
        return self.seen[start : self._looked]

    def end(self, within_s=60.0):
        """Its exit code, once it has ended by itself."""
        until = time.monotonic() + within_s
        while self._read():
            assert time.monotonic() < until, f"it goes on: {self.seen!r}"
        _, status = os.waitpid(self._pid, 0)
        self._pid = 0
        return os.waitstatus_to_exitcode(status)

    def close(self):
        if self._pid:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        os.close(self._terminal)

    def _read(self):
        """Whether more may come."""
        if not select.select([self._terminal], [], [], 0.2)[0]:
            return True
        try:
            read = os.read(self._terminal, 65536)
        except OSError:  # the other end is closed
            return False
        self.seen += read.decode(errors="replace")
        return bool(read)
