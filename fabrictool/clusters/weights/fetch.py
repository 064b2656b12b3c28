"""Fetches the files of a set where they are to lie: a program by itself, which a login node or a job runs.

Its text is sent to the site, so nothing but Python 3.8 and its library is used. Argument: a JSON file that says what is
wanted (`Wanted` in `fetching`). What it does is told on stdout and in a file, one JSON object each. It ends with one
whose state is staged, damaged, failed, busy or ended.
"""

from __future__ import annotations

import contextlib
import email.utils
import errno
import http.client
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

HUB = "https://huggingface.co"
TRIES = 8
"""In a row without a single octet more."""
LONGEST_PAUSE_S = 60.0
LONGEST_WAIT_S = 600.0
"""Of what a server may ask for with ``Retry-After``."""
TIMEOUT_S = 60.0
BEAT_S = 4.0
WATCH_S = 20.0
"""A lock without a beat for so long is nobody's: five beats, and more than a shared file system keeps attributes."""
TELL_S = 1.0
_PIECE = 1 << 20
_PASSING = frozenset({408, 425, 429, 500, 502, 503, 504, 520, 522, 524})
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class PassingTrouble(Exception):  # noqa: N818 - it is tried again, and then no error
    """What may go well the next time."""

    def __init__(self, text: str, wait_s: float | None = None) -> None:
        super().__init__(text)
        self.wait_s = wait_s


class FetchRefusedError(Exception):
    """What no further try changes."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind
        """``denied``, ``absent``, ``changed``, ``full``, ``network`` or ``refused``."""


class HeldByAnotherError(Exception):
    """The lock is somebody's who lives; the text says whose."""


class _Redirects(urllib.request.HTTPRedirectHandler):
    """A hub sends its clients on to other hosts for large files: its token is for the hub alone."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        scheme = urllib.parse.urlsplit(newurl).scheme
        if scheme not in ("http", "https") or (req.type == "https" and scheme != "https"):
            raise urllib.error.HTTPError(req.full_url, code, f"it leads to {scheme}://", headers, fp)
        # Before 3.11 it does not know of 308, which differs from 307 in nothing that counts here.
        new = super().redirect_request(req, fp, 307 if code == 308 else code, msg, headers, newurl)
        token = req.unredirected_hdrs.get("Authorization")
        if new is not None and token and origin(newurl) == origin(req.full_url):
            new.add_unredirected_header("Authorization", token)
        return new

    http_error_308 = urllib.request.HTTPRedirectHandler.http_error_302


class Web:
    """HTTP with the proxies and the hub's token of an environment."""

    def __init__(self, environment: Mapping[str, str], endpoint: str = HUB) -> None:
        self.endpoint = (environment.get("HF_ENDPOINT") or endpoint).rstrip("/")
        self._token = hub_token(environment)
        self._opener = urllib.request.build_opener(_Redirects)

    def open(self, url: str, begin: int = 0) -> http.client.HTTPResponse:
        """The answer to GET, from octet `begin` on if the server can.

        Raises
        ------
        PassingTrouble, FetchRefusedError
        """
        headers = {"Accept-Encoding": "identity", "User-Agent": "fabrictool"}
        if begin:
            headers["Range"] = f"bytes={begin}-"
        request = urllib.request.Request(url, headers=headers)  # noqa: S310 - http and https alone are sources
        if self._token and origin(url) == origin(self.endpoint) and confidential(url):
            request.add_unredirected_header("Authorization", f"Bearer {self._token}")
        try:
            answer: http.client.HTTPResponse = self._opener.open(request, timeout=TIMEOUT_S)
        except urllib.error.HTTPError as error:
            with error:
                raise self._judged(error, url) from None
        except (OSError, http.client.HTTPException) as error:
            raise PassingTrouble(f"{host_of(url)}: {getattr(error, 'reason', None) or error}") from error
        return answer

    def _judged(self, error: urllib.error.HTTPError, url: str) -> Exception:
        text = f"{bare(url)} answers {error.code}"
        if error.code in _PASSING:
            return PassingTrouble(text, retry_after(error.headers.get("Retry-After", ""), time.time()))
        if error.code == 416:
            size = error.headers.get("Content-Range", "").rpartition("/")[2]
            return RangeRefusedError(int(size) if size.isdigit() else -1)
        if error.code in (401, 403):
            hub = origin(url) == origin(self.endpoint)
            why = "the token there does not open it" if self._token else "there is no token"
            return FetchRefusedError("denied", f"{text}: {why}" if hub else text)
        return FetchRefusedError("absent" if error.code in (404, 410) else "refused", text)

    def read(self, url: str, most: int = 64 << 20) -> tuple[bytes, str]:
        """A small document and its header ``Link``; tries again what may pass."""
        tries = 0
        while True:
            try:
                with self.open(url) as answer:
                    data, length = answer.read(most), answer.headers.get("Content-Length")
                    if length is None or len(data) == min(int(length), most):
                        return data, str(answer.headers.get("Link") or "")
                    trouble = PassingTrouble(f"{host_of(url)}: the connection broke")
            except PassingTrouble as error:
                trouble = error
            except (OSError, http.client.HTTPException) as error:
                trouble = PassingTrouble(f"{host_of(url)}: {error}")
            tries += 1
            if tries > TRIES // 2:
                raise FetchRefusedError("network", str(trouble))
            time.sleep(pause(tries, trouble.wait_s))


class RangeRefusedError(Exception):
    """HTTP 416; the size is that of the whole file, -1 when it is not said."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.size = size


def origin(url: str) -> tuple[str, str, int]:
    """Scheme, host and port."""
    parts = urllib.parse.urlsplit(url)
    return parts.scheme, parts.hostname or "", parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0)


def confidential(url: str) -> bool:
    """Whether nobody on the way reads along."""
    scheme, host, _ = origin(url)
    return scheme == "https" or host in ("localhost", "::1") or host.startswith("127.")


def host_of(url: str) -> str:
    return urllib.parse.urlsplit(url).netloc.rpartition("@")[2]


def bare(url: str) -> str:
    """Without what may be a signature in it."""
    return urllib.parse.urlsplit(url)._replace(query="", fragment="").geturl()


def hub_token(environment: Mapping[str, str]) -> str:
    """Of ``HF_TOKEN``, else of the file in which the hub's own tools keep it; "": none."""
    if environment.get("HF_TOKEN"):
        return environment["HF_TOKEN"].strip()
    home = environment.get("HOME") or os.path.expanduser("~")  # noqa: PTH111 - the rest of it is text too
    cache = environment.get("XDG_CACHE_HOME") or f"{home}/.cache"
    folder = environment.get("HF_HOME") or f"{cache}/huggingface"
    try:
        with open(environment.get("HF_TOKEN_PATH") or f"{folder}/token", encoding="ascii") as file:  # noqa: PTH123
            return file.read().strip()
    except (OSError, ValueError):
        return ""


def retry_after(value: str, now: float) -> float | None:
    """Seconds of a header that says seconds or a date; None for anything else."""
    if value.strip().isdigit():
        return min(LONGEST_WAIT_S, float(value))
    try:
        at = email.utils.parsedate_to_datetime(value).timestamp()
    except (TypeError, ValueError, IndexError):
        return None
    return min(LONGEST_WAIT_S, max(0.0, at - now))


def pause(tries: int, asked_s: float | None) -> float:
    """Seconds before the next try: what the server asked for, else twice as long each time."""
    return asked_s if asked_s is not None else min(LONGEST_PAUSE_S, 2.0**tries / 2)


class SetLock:
    """One fetches a set at a time, also where login and compute nodes share no locks: a file whose holder writes into
    it again and again. Nobody compares clocks: who comes watches whether it changes.

    Who follows a holder that died takes nothing away, for by then it may be another's: it adds a file that is named
    after that holder. The last of such a row is the lock; each is a link, so that it is there whole or not at all.
    """

    def __init__(self, path: str, watch_s: float = WATCH_S, beat_s: float = BEAT_S) -> None:
        self._path, self._watch_s, self._beat_s = path, watch_s, beat_s
        self._mark = secrets.token_hex(6)
        self._over = threading.Event()
        self._beating = threading.Thread(target=self._beats, daemon=True)
        self._file = -1
        self.lost = False

    def __enter__(self) -> SetLock:  # noqa: PYI034 - `Self` is newer than the Pythons of sites
        """Wait until it is known whether a holder lives; raises HeldByAnotherError if one does."""
        own = f"{self._path}.{self._mark}.new"
        self._file = os.open(own, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        try:
            self._write(0)
            while not self._taken(own):
                pass
        except BaseException:
            os.close(self._file)
            raise
        finally:
            os.unlink(own)  # noqa: PTH108 - plain text paths here
        self._beating.start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            row = self._row()
            if self._last_of(row):
                for path, _held in row:  # the first at first: what is behind it nobody reads then
                    os.unlink(path)  # noqa: PTH108
        self._over.set()
        self._beating.join()  # it writes into what is closed here
        os.close(self._file)

    def _taken(self, own: str) -> bool:
        row, place = self._row(), self._path
        if row:
            last, held = row[-1]
            if not _dead(held) and not self._silent(last, held):
                return False
            place = self._after(held)
        with contextlib.suppress(FileExistsError):  # a client of NFS may say so of its own link
            os.link(own, place)
        row = self._row()
        if place not in dict(row) and _mark(_read(place) or "") == self._mark:
            os.unlink(place)  # the row in front of it was taken away since  # noqa: PTH108
        return self._last_of(row)

    def _silent(self, path: str, held: str) -> bool:
        """Whether its holder did nothing for long; not if it is gone."""
        end = time.monotonic() + self._watch_s
        while time.monotonic() < end:
            time.sleep(min(0.5, self._watch_s / 20))
            now = _read(path)
            if now is None:
                return False
            if now != held:
                raise HeldByAnotherError(now.split(" ")[0])
        return True

    def _row(self) -> list[tuple[str, str]]:
        """Path and text of each holder's file: those that died, and the last."""
        row: dict[str, str] = {}
        path = self._path
        while path not in row and (held := _read(path)) is not None:
            row[path] = held
            path = self._after(held)
        return list(row.items())

    def _after(self, held: str) -> str:
        return f"{self._path}.{_mark(held)}"

    def _mine(self) -> bool:
        try:
            return self._last_of(self._row())
        except OSError:
            return False

    def _last_of(self, row: list[tuple[str, str]]) -> bool:
        return bool(row) and _mark(row[-1][1]) == self._mark

    def _beats(self) -> None:
        number = 0
        while not self._over.wait(self._beat_s):
            number += 1
            with contextlib.suppress(OSError):
                self._write(number)
            self.lost = not self._mine()

    def _write(self, number: int) -> None:
        # In place: what somebody took away is not put back.
        os.pwrite(self._file, f"{socket.gethostname()} {os.getpid()} {self._mark} {number:08d}\n".encode(), 0)
        os.fsync(self._file)  # or a client of NFS keeps it for longer than others watch


def _read(path: str) -> str | None:
    """What is in a holder's file; None where there is none."""
    try:
        with open(path, encoding="utf-8") as file:  # noqa: PTH123
            return file.read().strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.ESTALE:  # it was removed by another machine while it was read
            return None
        raise


def _mark(held: str) -> str:
    return [*held.split(" "), "", "", ""][2]


def _dead(held: str) -> bool:
    """Whether its holder was a process of this machine that is gone."""
    host, _, rest = held.partition(" ")
    number = rest.split(" ")[0]
    if host != socket.gethostname() or not number.isdigit():
        return False
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


class Fetcher:
    """One set's way to where it lies."""

    def __init__(self, wanted: dict[str, Any], environment: Mapping[str, str]) -> None:
        self._wanted = wanted
        self._web = Web(environment, wanted["endpoint"])
        self._total = sum(file["octets"] or 0 for file in wanted["files"])
        self._done, self._told = 0, 0.0
        self._lock: SetLock | None = None

    def run(self) -> int:
        """Fetch, compare, name; what is found damaged is fetched once more. Returns an exit status."""
        os.makedirs(os.path.dirname(self._wanted["lock"]), exist_ok=True)  # noqa: PTH103, PTH120
        try:
            with SetLock(self._wanted["lock"], self._wanted.get("watch_s", WATCH_S)) as self._lock:
                damaged = self._round()
                if damaged:
                    damaged = self._round()
        except HeldByAnotherError as error:
            return self._end("busy", str(error))
        except FetchRefusedError as error:
            return self._end("failed", str(error), kind=error.kind)
        except OSError as error:
            return self._end("failed", str(error), kind="full" if error.errno in _FULL else "refused")
        except (KeyboardInterrupt, SystemExit):
            return self._end("ended", "it was told to end")
        return self._end("damaged", "\n".join(damaged)) if damaged else self._end("staged", "")

    def _round(self) -> list[str]:
        self._done = 0
        for file in self._wanted["files"]:
            self._file(file)
        self._tell("hashing", "", always=True)
        done = subprocess.run(self._wanted["close"], capture_output=True, check=False)
        lines = done.stdout.decode(errors="replace").splitlines()
        if done.returncode != 0:
            raise FetchRefusedError("refused", done.stderr.decode(errors="replace").strip()[-300:])
        return [] if lines == ["staged"] else [line.partition("\t")[2] for line in lines] or ["the list"]

    def _file(self, file: dict[str, Any]) -> None:
        path = os.path.join(self._wanted["part"], file["name"])  # noqa: PTH118
        begun, tries = self._done, 0
        while not os.path.exists(path):  # noqa: PTH110
            before = size_of(f"{path}.part")
            try:
                self._once(file, path, begun)
            except PassingTrouble as trouble:
                tries = 1 if size_of(f"{path}.part") > before else tries + 1
                if tries > TRIES:
                    raise FetchRefusedError("network", str(trouble)) from trouble
                wait = pause(tries, trouble.wait_s) * float(self._wanted.get("pause", 1.0))
                self._tell("waiting", f"{trouble}; next try in {wait:.0f} s", always=True)
                time.sleep(wait)
        self._done = begun + size_of(path)
        self._tell("fetching", file["name"])

    def _once(self, file: dict[str, Any], path: str, begun: int) -> None:
        """One request; raises PassingTrouble, FetchRefusedError."""
        part, octets = f"{path}.part", file["octets"]
        at = size_of(part)
        if at and at == octets:
            os.replace(part, path)  # noqa: PTH105
            return
        at = 0 if octets is not None and at > octets else at
        try:
            answer = self._web.open(file.get("url") or f"{self._web.endpoint}/{file['path']}", at)
        except RangeRefusedError as error:
            if error.size == at:
                os.replace(part, path)  # noqa: PTH105
                return
            os.unlink(part)  # noqa: PTH108
            raise PassingTrouble(f"{file['name']}: the server has no octet {at}") from error
        with answer:
            begin = (
                at if answer.status == 206 and answer.headers.get("Content-Range", "").startswith(f"bytes {at}-") else 0
            )
            if answer.status == 206 and begin != at:
                raise PassingTrouble(f"{file['name']}: the server sends another part than was asked for")
            length = answer.headers.get("Content-Length", "")
            total = begin + int(length) if length.isdigit() else octets
            if octets is not None and total != octets:
                raise FetchRefusedError(
                    "changed", f"{file['name']} has {total} octets there, and {octets} when it was listed"
                )
            self._store(answer, part, begin, begun)
        if total is not None and size_of(part) != total:
            raise PassingTrouble(f"{file['name']}: the connection broke at octet {size_of(part)}")
        os.replace(part, path)  # noqa: PTH105

    def _store(self, answer: http.client.HTTPResponse, part: str, begin: int, begun: int) -> None:
        with open(part, "r+b" if begin else "wb") as out:  # noqa: PTH123
            if begin:
                out.seek(begin)
                out.truncate()
            while True:
                try:
                    piece = answer.read1(_PIECE)  # what has come, be it little: it is kept when this is killed
                except (OSError, http.client.HTTPException) as error:
                    raise PassingTrouble(f"the connection broke: {error}") from error
                if not piece:
                    return
                out.write(piece)
                if self._lock is not None and self._lock.lost:
                    raise HeldByAnotherError("another machine")
                self._done = begun + out.tell()
                self._tell("fetching", os.path.basename(part)[: -len(".part")])  # noqa: PTH119

    def _end(self, state: str, text: str, kind: str = "") -> int:
        self._tell(state, text, kind=kind, always=True)
        return 0 if state == "staged" else 1

    def _tell(self, state: str, text: str, kind: str = "", *, always: bool = False) -> None:
        now = time.monotonic()
        if not always and now - self._told < TELL_S:
            return
        self._told = now
        report = {"state": state, "done": self._done, "total": self._total, "text": text, "kind": kind}
        line = json.dumps(report)
        with contextlib.suppress(OSError):  # nobody listens any more
            print(line, flush=True)  # noqa: T201
        told = self._wanted["progress"]
        with contextlib.suppress(OSError):
            with open(f"{told}.new", "w", encoding="utf-8") as file:  # noqa: PTH123
                file.write(line)
            os.replace(f"{told}.new", told)  # noqa: PTH105


def size_of(path: str) -> int:
    """Octets; 0 for what is not there."""
    try:
        return os.stat(path).st_size  # noqa: PTH116
    except OSError:
        return 0


def _told_to_end(_number: int, _frame: object) -> None:
    raise SystemExit(1)


def main(argv: list[str]) -> int:
    """As the site's Python runs it."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, _told_to_end)
    os.umask(0o077)
    with open(argv[1], encoding="utf-8") as file:  # noqa: PTH123
        wanted = json.load(file)
    return Fetcher(wanted, os.environ).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv))
