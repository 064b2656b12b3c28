"""The record store in a process of its own.

To load SQLAlchemy and to speak with a database takes the interpreter's lock, again and again, and 60 MB: on a busy
machine a gateway's event loop stood still for seconds, and its agents took it for lost. The process is started when
there is something to write, and ends when there was nothing for a while, or with its gateway, however that ends.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import astuple

from fabrictool.base.errors import FabrictoolError, InvalidInputError, Problem
from fabrictool.gateway.keyrecords import KeyChanges, KeyState, KeyUsage
from fabrictool.gateway.records import HOUR_S, RequestRecord, StoreAwayError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from io import BufferedRWPair

    from fabrictool.gateway.filestore import FileStore
    from fabrictool.gateway.store import RecordStore

REST_S = 60.0
"""The process of a store that nobody used for so long is ended: it takes a second to start another."""
END_S = 10.0
NICENESS = 5
"""The requests of the gateway beside it go first."""
_NAME = "fabrictool.gateway.storeprocess"
_AGAIN = "again"
"""Says to the program that another one was this process before."""
_LENGTH = struct.Struct("<I")
_NUL = rb"\u0000"
"""PostgreSQL's texts have none."""
YOUNG_OBJECTS = 50_000
"""Before the collector looks at them (Python: 700): a batch of records makes many, and none of them is garbage yet."""
CALL_S = 60.0
"""A database whose host is gone without a word would be waited for as long as its network likes."""

_log = logging.getLogger("fabrictool.gateway")


class Put(msgspec.Struct, frozen=True, tag=True):
    """Whole lines of a spool, each a record in JSON; the answer is how many could not be read."""

    fabric: str
    gateway: str
    lines: bytes


class Take(msgspec.Struct, frozen=True, tag=True):
    """The answer is how many tokens were granted."""

    account: str
    period: str
    wanted: int
    limit: int


class Give(msgspec.Struct, frozen=True, tag=True):
    """The answer is 0."""

    account: str
    period: str
    tokens: int


class Forget(msgspec.Struct, frozen=True, tag=True):
    """The answer is how many records were forgotten."""

    fabric: str
    before: float


class ReadKeys(msgspec.Struct, frozen=True, tag=True):
    """The answer has `keys`."""

    fabric: str
    since: int


class WriteKeys(msgspec.Struct, frozen=True, tag=True):
    """The answer is their revision, or 0."""

    fabric: str
    states: list[KeyState]


class AddUpKeys(msgspec.Struct, frozen=True, tag=True):
    """The answer has `usage`."""

    fabric: str
    since: float
    until: float


Asks = Put | Forget | Take | Give | ReadKeys | WriteKeys | AddUpKeys


class Call(msgspec.Struct, frozen=True):
    """What is sent to the process."""

    address: str
    """Of the store; another one than before opens another store."""
    asks: Asks


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """What it sends back: a value, or a problem."""

    value: int = 0
    keys: KeyChanges | None = None
    usage: list[KeyUsage] = []
    problem: Problem | None = None
    away: bool = False


class StoreProcess:
    """What a gateway uses of its record store, from any thread; all of it blocks.

    Each method raises StoreAwayError FT8120 and InvalidInputError FT8121 or FT8122 as `RecordStore` does, and what
    `address` raises; the next call tries again.
    """

    def __init__(self, address: Callable[[], str]) -> None:
        """`address` is read anew for each call; see `store_url`."""
        self._address = address
        self._process: _Process | None = None
        self._used_at = 0.0
        self._lock = threading.Lock()

    def put(self, fabric: str, gateway: str, lines: bytes) -> int:
        """Records, once each however often they come; returns how many of the lines are none."""
        return self._call(Put(fabric, gateway, lines)).value

    def forget(self, fabric: str, before: float) -> int:
        """Records that are older, some hours of them; returns how many. See `RecordStore`."""
        return self._call(Forget(fabric, before)).value

    def take(self, account: str, period: str, *, wanted: int, limit: int) -> int:
        """Tokens of a budget, `wanted` at most; returns how many were granted. See `RecordStore`."""
        return self._call(Take(account, period, wanted, limit)).value

    def give(self, account: str, period: str, tokens: int) -> None:
        """Tokens that were taken and not used; a call that fails may have been carried out."""
        self._call(Give(account, period, tokens))

    def read_keys(self, fabric: str, since: int) -> KeyChanges:
        """What changed after a revision; see `RecordStore.keys`."""
        return self._call(ReadKeys(fabric, since)).keys or KeyChanges(since, [], whole=False)

    def write_keys(self, fabric: str, states: Sequence[KeyState]) -> int:
        """Their revision, or 0; see `RecordStore`. One that fails may have been carried out, wholly."""
        return self._call(WriteKeys(fabric, list(states))).value

    def key_usage(self, fabric: str, since: float, until: float) -> list[KeyUsage]:
        """Sums over ``since <= at < until``; see `sums.key_usage`."""
        return self._call(AddUpKeys(fabric, since, until)).usage

    def rest(self) -> None:
        """End the process if nobody needs it now."""
        with self._lock:
            if time.monotonic() - self._used_at > REST_S:
                self._end()

    def close(self) -> None:
        with self._lock:
            self._end()

    # -- internals --------------------------------------------------------------------------------------------

    def _call(self, asks: Asks) -> Answer:
        with self._lock:
            call = Call(self._address(), asks)
            self._used_at = time.monotonic()
            try:
                answer = self._exchange(call)
            except (OSError, EOFError, msgspec.DecodeError) as error:
                self._end()
                message = "the process that writes the records' store has ended"
                raise StoreAwayError(Problem("FT8120", message, hint="see the log", transient=True)) from error
        if answer.problem is not None:
            raise (StoreAwayError if answer.away else InvalidInputError)(answer.problem)
        return answer

    def _exchange(self, call: Call) -> Answer:
        process = self._process = self._process or _Process()
        _write(process.stream, call)
        return msgspec.msgpack.decode(_read(process.stream), type=Answer)

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.end()


class _Process:
    """It reads calls from its standard input, a socket, and answers there."""

    def __init__(self) -> None:
        ours, its = socket.socketpair()
        ours.settimeout(CALL_S)
        with ours, its:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", _NAME],
                stdin=its.fileno(),
                stdout=2,  # what a library prints is for the log
                start_new_session=True,  # Ctrl-C is for the gateway, which has its last records written then
            )
            self.stream = ours.makefile("rwb")
        self.pid = self._process.pid

    def end(self) -> None:
        """What it was asked before is done then."""
        with contextlib.suppress(OSError):
            self.stream.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _write(stream: BufferedRWPair, value: Call | Answer) -> None:
    data = msgspec.msgpack.encode(value)
    stream.write(_LENGTH.pack(len(data)))
    stream.write(data)
    stream.flush()


def _read(stream: BufferedRWPair) -> bytes:
    """Raises EOFError where the other end is gone."""
    length = stream.read(_LENGTH.size)
    if len(length) < _LENGTH.size:
        raise EOFError
    (octets,) = _LENGTH.unpack(length)
    data = stream.read(octets)
    if len(data) < octets:
        raise EOFError
    return data


class _Served:
    """The other end: a store that is opened at need, and anew after an error."""

    def __init__(self) -> None:
        self._store: RecordStore | None = None
        self._file: FileStore | None = None
        self._address = ""
        self._decoder = msgspec.json.Decoder(RequestRecord)
        self._forgot = self._asked_for_keys = False

    def answer(self, call: Call) -> Answer:
        try:
            if call.address != self._address:
                self.close()
                self._address = call.address
            return self._carry_out(call.asks)
        except FabrictoolError as error:
            self.close()
            return Answer(problem=error.problems[0], away=isinstance(error, StoreAwayError))
        except Exception as error:  # noqa: BLE001 - whatever it was, the next call is another one
            _log.exception("a call of the records' store failed")
            self.close()
            message = f"the records' store failed: {type(error).__name__}"
            return Answer(problem=Problem("FT8120", message, hint="see the log", transient=True), away=True)

    @property
    def is_laden(self) -> bool:
        """Whether it holds what it took to make a file's tables or to forget, and will not need that again soon."""
        seldom = self._store is not None and (self._store.made or self._forgot) and not self._asked_for_keys
        return seldom and self._address.startswith("/")

    def close(self) -> None:
        for store in (self._store, self._file):
            if store is not None:
                store.close()
        self._store = self._file = None

    def _busy(self) -> RecordStore | FileStore:
        """For what is asked all the time."""
        if self._store is None and self._file is None and self._address.startswith("/"):
            from fabrictool.gateway.filestore import FileStore  # noqa: PLC0415 - here, and not in the gateway

            self._file = FileStore.opened(Path(self._address))
        return self._file or self._whole()

    def _whole(self) -> RecordStore:
        if self._store is None:
            from fabrictool.gateway.store import RecordStore  # noqa: PLC0415 - where it is needed

            self.close()
            self._store = RecordStore(self._address)
        return self._store

    def _carry_out(self, asks: Asks) -> Answer:
        match asks:
            case Put(fabric, gateway, lines):
                records, wrong = self._records(lines)
                store = self._busy()
                if records:
                    store.put([(r.id, fabric, gateway, int(r.at // HOUR_S), *astuple(r)[1:]) for r in records])
                return Answer(wrong)
            case Take(account, period, wanted, limit):
                return Answer(self._busy().take(account, period, wanted=wanted, limit=limit))
            case Give(account, period, tokens):
                self._busy().give(account, period, tokens)
                return Answer()
            case Forget(fabric, before):
                busy = self._busy()
                if busy is self._file and not self._file.has_older(fabric, before):
                    return Answer(0)
                self._forgot = True
                return Answer(self._whole().forget(fabric, before))
            case ReadKeys(fabric, since):
                self._asked_for_keys = True
                return Answer(keys=self._whole().keys(fabric, since))
            case WriteKeys(fabric, states):
                self._asked_for_keys = True
                return Answer(self._whole().write_keys(fabric, states))
            case AddUpKeys(fabric, begin, end):
                from fabrictool.gateway.sums import key_usage  # noqa: PLC0415 - as `RecordStore`

                self._asked_for_keys = True
                return Answer(usage=key_usage(self._whole(), fabric, since=begin, until=end))

    def _records(self, lines: bytes) -> tuple[list[RequestRecord], int]:
        """And how many of the lines are none."""
        if b"\\" not in lines or _NUL not in lines:  # one octet is found much sooner
            with contextlib.suppress(msgspec.DecodeError):
                return self._decoder.decode_lines(lines), 0
        records, every = list[RequestRecord](), lines.splitlines()
        for line in every:
            with contextlib.suppress(msgspec.DecodeError):
                record = self._decoder.decode(line)
                if _NUL in line:
                    record = msgspec.convert(_without_nul(msgspec.structs.asdict(record)), RequestRecord)
                records.append(record)
        return records, len(every) - len(records)


def _without_nul(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.replace("\0", "") if isinstance(value, str) else value for name, value in fields.items()}


def serve() -> None:
    """Until standard input ends; signals are the gateway's to obey."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if _AGAIN not in sys.argv:
        os.nice(NICENESS)
    gc.set_threshold(YOUNG_OBJECTS)
    served = _Served()
    with socket.socket(fileno=0) as calls, calls.makefile("rwb") as stream, contextlib.suppress(EOFError, OSError):
        while True:
            _write(stream, served.answer(msgspec.msgpack.decode(_read(stream), type=Call)))
            if served.is_laden:  # by 35 MB of code: another program goes on, with the same socket
                served.close()
                os.execv(sys.executable, [sys.executable, "-P", "-m", _NAME, _AGAIN])  # noqa: S606 - it is this one
    served.close()


if __name__ == "__main__":
    serve()
