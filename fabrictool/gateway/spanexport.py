"""Bringing spans to a collector of OpenTelemetry, by OTLP over HTTP.

In the event loop, and not by OpenTelemetry's own exporter: that works in a thread, which takes the interpreter's lock
from the loop while it encodes. A batch is encoded in slices of a fraction of a millisecond, and sent while requests go
on. Spans are figures and no accounts: what a collector that is away does not take is dropped, and counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
from typing import TYPE_CHECKING

import aiohttp

from fabrictool.base.errors import FabrictoolError
from fabrictool.gateway.otlp import encode, rejected
from fabrictool.mesh.transport.reach import read_secret

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from fabrictool.domain.specs import GatewaySpec, TelemetrySpec
    from fabrictool.gateway.gateway import GatewayServer
    from fabrictool.gateway.tracing import Tracer

CODE = "FT8161"
PERIOD_S = 1.0
BATCH, SLICE = 512, 32
"""Spans in a request, and those that are encoded at a time: the loop does other things between."""
TRIES = 4
PATIENCE_S = 10.0
"""For an answer of the collector's."""
LAST_S = 3.0
"""For what waits when the gateway ends."""
ANSWER_OCTETS = 65536
_log = logging.getLogger("fabrictool.gateway")
_LATER = frozenset({429, 502, 503, 504})
"""What OTLP says may be tried again."""


class SpanExporter:
    """Takes spans from a tracer, and sends them until its gateway ends."""

    def __init__(self, tracer: Tracer, spec: TelemetrySpec, gateway: GatewayServer, names: tuple[str, str]) -> None:
        """`names`: of the fabric, and of the gateway."""
        self._tracer = tracer
        self._spec = spec
        self._note = gateway.note
        self._names = names
        self.period_s = PERIOD_S
        """Between two looks, and before a second try; doubled before each further one."""
        self._away = ""
        """Why the collector took nothing last time."""

    async def run(self) -> None:
        """Until it is cancelled."""
        async with self._session() as http:
            while True:
                await asyncio.sleep(self.period_s)
                while len(self._tracer):
                    try:
                        await self._bring(http, TRIES)
                    except Exception:  # noqa: BLE001 - the next batch is another one
                        _log.exception("spans could not be brought to the collector")

    async def finish(self) -> None:
        """Bring what waits, at once or not at all."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_S), self._session() as http:
                while len(self._tracer):
                    await self._bring(http, 1)
        self._tracer.count("dropped", len(self._tracer.take(len(self._tracer))))

    # -- internals --------------------------------------------------------------------------------------------

    @staticmethod
    def _session() -> aiohttp.ClientSession:
        return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PATIENCE_S))

    async def _bring(self, http: aiohttp.ClientSession, tries: int) -> None:
        """A batch, which is exported, or dropped, also where this is cancelled."""
        spans = self._tracer.take(BATCH)
        taken = 0
        try:
            body = b""
            for at in range(0, len(spans), SLICE):  # requests to a collector, one after another, are one request
                body += encode(spans[at : at + SLICE], *self._names)
                await asyncio.sleep(0)
            taken = await self._send(http, body, len(spans), tries)
        finally:
            self._tracer.count("exported", taken)
            self._tracer.count("dropped", len(spans) - taken)

    async def _send(self, http: aiohttp.ClientSession, body: bytes, spans: int, tries: int) -> int:
        """Returns how many the collector has."""
        for number in range(tries):
            if number:
                await asyncio.sleep(self.period_s * 2 ** (number - 1))
            try:
                headers = {"content-type": "application/x-protobuf"}
                for name, reference in self._spec.headers.items():
                    headers[name] = await asyncio.to_thread(read_secret, reference, os.environ)
                # A redirect would carry the headers elsewhere.
                async with http.post(self._address, data=body, headers=headers, allow_redirects=False) as answer:
                    text = await answer.content.read(ANSWER_OCTETS)
                    status = answer.status
            except FabrictoolError as error:
                self._tell(error.problems[0].message)
                return 0
            except (aiohttp.ClientError, OSError, ValueError) as error:  # TimeoutError is one
                self._tell(str(error) or type(error).__name__)
                continue
            if status == 200:
                self._tell("")
                return max(0, spans - rejected(text))
            self._tell(f"its answer is status {status}")
            if status not in _LATER:
                break
        return 0

    @property
    def _address(self) -> str:
        return f"{self._spec.endpoint.rstrip('/')}/v1/traces"

    def _tell(self, why: str) -> None:
        """Once, when it changes whether the collector takes what it is sent."""
        if bool(why) != bool(self._away):
            text = f"{CODE}: the collector takes no spans, which are dropped: {why}" if why else "the collector is back"
            self._note("telemetry", self._spec.endpoint, text)
        self._away = why


@contextlib.asynccontextmanager
async def exporting(gateway: GatewayServer, spec: GatewaySpec, telemetry: TelemetrySpec) -> AsyncIterator[SpanExporter]:
    """Spans of the gateway's requests are exported until the context ends, and what is left then."""
    tracer = gateway.trace(telemetry.sample, random.SystemRandom())
    exporter = SpanExporter(tracer, telemetry, gateway, (spec.fabric, spec.name))
    task = asyncio.create_task(exporter.run())
    try:
        yield exporter
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await exporter.finish()
