"""The node agent: joins the mesh, keeps one engine, advertises it, forwards requests to it, leaves in order.

Order of leaving (architecture.md, rule 5): stop accepting → let open requests finish → DOWN → LEFT, acknowledged
by the gateways → stop the engine. Death in any other way is seen by the gateways as a broken tunnel.

Longer than most modules: the mesh calls this object back, and whatever were taken out would change the same fields.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import random
import secrets
from collections import Counter, deque
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import msgspec

from fabrictool import __version__
from fabrictool.agent.bodies import node_body, service_body
from fabrictool.agent.compiled import CompiledCache
from fabrictool.agent.crew import LEADER, Leader
from fabrictool.agent.forwarder import Forwarder, allowed
from fabrictool.agent.guarding import HAS_LEFT, NOT_PASSED, Guard, Refuser
from fabrictool.agent.launching import first_node, launch_of
from fabrictool.agent.measured import package_folder, signed_build
from fabrictool.agent.nextjob import NextJob
from fabrictool.agent.pairing import PairMember
from fabrictool.agent.quantifying import EngineEndpoint, Measurement, Quantifier, steps_file, version_of
from fabrictool.agent.specwatch import SpecWatch
from fabrictool.agent.supervisor import Supervisor
from fabrictool.base.clock import duration_text
from fabrictool.base.errors import FabrictoolError
from fabrictool.domain.specs import AgentTrust, BroughtEngine
from fabrictool.engines.adapter import adapter
from fabrictool.engines.artifacts import resolve
from fabrictool.mesh.identity import CLOCK_SKEW_S
from fabrictool.mesh.records import Lifecycle, with_note, with_steps
from fabrictool.mesh.transport.clocks import ClockWatch
from fabrictool.mesh.transport.node import MeshNode
from fabrictool.mesh.transport.sitelinks import own_address
from fabrictool.mesh.transport.tls import IdentityFiles
from fabrictool.status.documents import AgentStatus, EngineStatus, Event, Health
from fabrictool.status.signs import SignsOfLife

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fabrictool.agent.engine_address import EngineAddress
    from fabrictool.agent.ports import PortBlock
    from fabrictool.base.clock import Clock
    from fabrictool.base.runfolder import RunFolder
    from fabrictool.domain.observed import Awaited
    from fabrictool.domain.specs import AgentSpec
    from fabrictool.engines.adapter import EngineCommand
    from fabrictool.mesh.framing import StreamHead
    from fabrictool.mesh.identity import VerifiedSession
    from fabrictool.mesh.records import NodeBody, Record, ServiceBody
    from fabrictool.mesh.transport.listener import Load
    from fabrictool.mesh.transport.tunnel import TunnelStream

_log = logging.getLogger("fabrictool.agent")

EVENTS_KEPT = 200
TAIL_LINES = 20
LEAVE_S = 15.0
"""Between the end of draining and the end of the allocation: saying goodbye, stopping the engine."""
LOOK_S = 5.0
"""Between two looks at the spec. Thousands of agents may share a file system."""
WATCH_S = 60.0
"""Between two looks at the wall clock: a process may be stopped, and clocks are set."""
UNASKED_LOOK_S = 5.0
"""Between two looks whether a replica is asked for; no time is lost by it, for it sleeps until it may end."""
CERTIFICATE_WARNING_S = 4 * 3600.0
"""From here on `reconcile` starts a successor for what it placed; of what joined by itself somebody has to think."""
TENANTS_KEPT = 256
REFUSALS_NOTED = 64
NO_GATEWAY = "the engine is ready, but no gateway is reachable yet"


class Agent:
    """One run of one agent: one session, one replica."""

    _handover_host = ""

    # Long: a line for each thing that it holds.
    def __init__(
        self,
        spec: AgentSpec,
        folder: RunFolder,
        clock: Clock,
        *,
        python: str,
        cache: Path,
        ends_at: float | None = None,
    ) -> None:
        self.spec = spec
        self._clock = clock
        self._python = python
        self._cache = cache
        self._compiled = CompiledCache(spec, cache)
        self._keeping: asyncio.Task[bool] | None = None
        self._adapter = adapter(spec.engine)
        self.mesh = MeshNode(IdentityFiles(folder.identity), self, clock, hub=False)
        self._started = clock.monotonic()
        self._leaves_at = None if ends_at is None else self._started + ends_at - clock.wall()
        self._node_lifecycle = Lifecycle.JOIN
        self._service = b""
        self._service_lifecycle = Lifecycle.JOIN
        self._accepting = True
        self._build = b""
        """Evidence of the software that this process runs."""
        self._addresses: tuple[str, ...] = ()
        """Where it listens for its site."""
        self._ended = ""
        """Why others hear this session no more."""
        self._in_flight = 0
        self._in_flight_of: Counter[bytes] = Counter()
        """Gateway (session) → its part of `_in_flight`."""
        self._idle = asyncio.Event()
        self._idle.set()
        self._asked_at = clock.monotonic()
        """When a request ended last, or the engine became ready."""
        self._drained = False
        """All that was asked is answered, and nothing more is taken."""
        self._folder = folder
        self._stop = asyncio.Event()
        self._events: deque[Event] = deque(maxlen=EVENTS_KEPT)
        self._model_path = ""
        self._guard = Guard(spec.provider, _trust_of(spec))
        self._watch = SpecWatch(
            spec,
            folder,
            self._prepared,
            lambda kind, text: self._note(kind, self.spec.replica, text),
            self.mesh.renew,
            LOOK_S,
        )
        self._refused = 0
        self._refusals_noted: set[str] = set()
        self._requests_of: dict[str, int] = {}
        """``GROUP/PSEUDONYM`` → its requests; the one that asked last stands last."""
        self._warned = False
        self._signs = SignsOfLife(folder, self.health, self.status)
        self._next = NextJob(folder, clock, self._note)
        self._brought = BroughtEngine() if isinstance(spec.brought, msgspec.UnsetType) else spec.brought
        self._leader = None if spec.on_nodes == 1 else self._leader_of(folder)
        self._measured: Measurement | None = None
        """Of the engine that runs."""
        self._by_priority = False
        """Whether it was started so."""
        self._pair = PairMember(spec, self._adapter.capabilities, self._note)
        self._supervisor = Supervisor(
            self._adapter,
            self._command,
            spec.model,
            self._engine_moved,
            start_timeout_s=spec.start_timeout_s,
            brought=self._brought,
            crew=self._leader,
            before_ready=self._quantify,
        )

    @property
    def ends_at(self) -> float | None:
        """Wall time at which the allocation ends, by what is left of it: it gets no shorter when the clock is set."""
        own = None if self.spec.walltime_s is None else self._started + self.spec.walltime_s
        ends = min((end for end in (own, self._leaves_at) if end is not None), default=None)
        return None if ends is None else self._clock.wall() + ends - self._clock.monotonic()

    @property
    def certificate_ends_at(self) -> float:
        """Wall time from which no gateway hears this session; 0.0 before it has said who it is."""
        return self.mesh.certificate_ends_at or 0.0

    def request_stop(self, reason: str) -> None:
        """Begin to leave; safe to call from a signal handler and more than once."""
        if not self._stop.is_set():
            self._note("stopping", self.spec.replica, reason)
            self._stop.set()

    async def run(self) -> str:
        """Serve until told to stop or the walltime nears; returns the reason.

        Raises
        ------
        FabrictoolError
            FT70xx the engine or its model cannot be used, FT7103 the engine keeps failing. The agent has left the
            mesh in order before it raises.
        """
        if isinstance(self.spec.brought, msgspec.UnsetType):
            self._model_path = resolve(self.spec.source)
        await self._measure()
        await self._pair.open()
        if self._leader is not None:
            await self._lead(self._leader)
        self._publish_node(Lifecycle.JOIN)
        linking = asyncio.create_task(self._link_site())  # it may wait for names, and nothing else waits for it
        self.mesh.dial([(hub.host, hub.port) for hub in self.spec.hubs], self.spec.egress)
        signs = asyncio.create_task(self._signs.run())
        engine = asyncio.create_task(self._serve())
        stop = asyncio.create_task(self._stop.wait())
        watch = asyncio.create_task(self._watch.run(self._signs.touch))
        end = asyncio.create_task(self._until_end())
        unasked = asyncio.create_task(self._until_unasked())
        followed = asyncio.create_task(self._next.run(lambda: self._watch.spec.may_follow > 0, lambda: self.ends_at))
        clocks = asyncio.create_task(ClockWatch(self.mesh, self._clock, self._note).run())
        reason = "told to stop"
        try:
            awaited = {engine, stop, end, unasked, followed}
            done, _ = await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            for over in {end, followed} & done:
                reason = over.result()
            if engine in done:
                await engine  # raises what the supervisor raised
            if done == {unasked}:
                reason = unasked.result()
                self._folder.fall_dormant()
        finally:
            async with AsyncExitStack() as leaving:  # last in, first out; each step is taken whatever another raises
                if self._leader is not None:
                    leaving.push_async_callback(self._leader.close)
                leaving.push_async_callback(self._pair.close)
                leaving.callback(self._compiled.stop)
                leaving.push_async_callback(self._supervisor.stop)
                leaving.push_async_callback(self._signs.write)
                tasks = (engine, stop, signs, watch, end, unasked, linking, clocks)
                leaving.push_async_callback(cancelled, *tasks)
                leaving.push_async_callback(self._leave)
                if (
                    self._stop.is_set() or self._node_lifecycle is not Lifecycle.JOIN
                ):  # else the job before goes on with it
                    leaving.push_async_callback(asyncio.to_thread, self._next.forget)
                leaving.push_async_callback(cancelled, followed)  # first: who leaves has nobody follow any more
        return self._ended or reason

    def health(self) -> Health:
        engine, spec = self._supervisor, self.spec
        waits_for: Awaited = ""
        text = ""
        if not self._accepting:
            waits_for, text = "leaving", f"leaving: {self._in_flight} requests are open"
        elif self._has_engine and engine.state != "ready":
            waits_for, text = "engine", f"engine {engine.state}: {engine.progress}".rstrip(": ")
        elif spec.hubs and not self.mesh.hub_tunnels:
            why = "; ".join(f"{address}: {error}" for address, error in sorted(self.mesh.hub_links.errors.items()))
            waits_for, text = "gateway", f"{NO_GATEWAY}{': ' + why if why else ''}"
        text = text or self._watch.refusal or (self._certificate_text() if self._warned else "")
        return Health(
            at=self._clock.wall(),
            ready=not waits_for,
            waits_for=waits_for,
            text=text[:300],
            ends_at=self.ends_at,
            spec=self._watch.mark,
            certificate_ends_at=self.certificate_ends_at or None,
        )

    def status(self) -> AgentStatus:
        engine = self._supervisor
        return AgentStatus(
            release=__version__,
            at=self._clock.wall(),
            started_at=self._clock.wall() - (self._clock.monotonic() - self._started),
            fabric=self.spec.fabric,
            provider=self.spec.provider,
            site=self.spec.site,
            cluster=self.spec.cluster,
            node=self.spec.partition,
            replica=self.spec.replica,
            model=self._supervisor.model,
            session=self.mesh.session.hex(),
            lifecycle=self._node_lifecycle.name,
            accepting=self._accepting,
            in_flight=self._in_flight,
            ends_at=self.ends_at,
            certificate_ends_at=self.certificate_ends_at,
            engine=EngineStatus(
                engine=self.spec.engine,
                state=engine.state,
                pid=engine.pid,
                port=engine.address.port or None,
                socket=engine.address.socket,
                restarts=engine.restarts,
                progress=engine.progress,
                running=engine.running,
                waiting=engine.waiting,
                kv_use=engine.kv_use,
                last_lines=list(engine.lines)[-20:],
                elastic=engine.elastic,
                by_priority=self._by_priority,
                steps=None if self._measured is None else self._measured.row(),
            ),
            links=[session.hex() for session in self.mesh.neighbours],
            dial_errors=dict(self.mesh.hub_links.errors),
            registry_root=self.mesh.registry.root().hex(),
            requests_of=dict(self._requests_of),
            refused=self._refused,
            events=list(self._events),
        )

    # -- Listener, for the mesh -------------------------------------------------------------------------------

    def record_changed(self, record: Record) -> None:
        """Agents only relay their own records; what others say is for gateways."""

    def session_ended(self, reason: str) -> None:
        """Nobody hears this session any more: leave, so that another job can serve with a new one."""
        self._ended = reason
        self.request_stop(reason)

    def tail_heard(self, session: bytes, service: bytes, text: str) -> None:
        """How a log ended is told to hubs alone."""

    def link_changed(self, session: bytes, *, up: bool, reason: str) -> None:
        """A gateway's tunnel came or went, or one of our site's agents."""
        node = self.mesh.registry.node(session)
        kind = "site-link" if node is not None and node.role == "agent" else "link"
        self._note(f"{kind}-{'up' if up else 'down'}", session.hex()[:8], reason)

    def load_reported(self, session: bytes, load: Load) -> None:
        """Gateways report no load."""

    def load(self, peer: bytes) -> Load:
        """The engine's queue as last scraped, and the requests that other gateways have open on it now."""
        if not self._service:
            return ()
        engine = self._supervisor
        foreign = self._in_flight - self._in_flight_of[peer]
        return ((self._service, engine.running, engine.waiting, engine.kv_use, foreign),)

    def stream_opened(self, stream: TunnelStream, head: StreamHead, peer: VerifiedSession) -> asyncio.Protocol | None:
        """A request from a gateway for one of our services; nobody else may send one."""
        if peer.claims.role != "gateway" or head.service != self._service:
            _log.warning("refused %s %s from %s", head.method, head.path[:80], peer.claims.uri())
            return None
        if not allowed(head):
            _log.warning("passed no %s %s from %s", head.method, head.path[:80], peer.claims.uri())
            return Refuser(NOT_PASSED.answer)
        gateway = peer.claims.provider
        denial = self._guard.denial(head, gateway, self._clock.monotonic())
        if denial is not None:
            self._refused += 1
            if len(self._refusals_noted) < REFUSALS_NOTED and denial.text not in self._refusals_noted:
                self._refusals_noted.add(denial.text)
                self._note("refused", gateway, f"{denial.code} {denial.text}")
            return Refuser(denial.answer)
        if self._drained:
            return Refuser(HAS_LEFT)
        if self._supervisor.state != "ready":
            return None
        self._count(head)
        self._in_flight += 1
        self._in_flight_of[peer.session] += 1
        self._idle.clear()
        return Forwarder(head, self._supervisor.address, lambda: self._request_finished(peer.session))

    # -- internals --------------------------------------------------------------------------------------------

    @property
    def _has_engine(self) -> bool:
        """Whether there is one to wait for."""
        return True

    async def _serve(self) -> None:
        """Until cancelled; raises what `run` does."""
        if await asyncio.to_thread(self._compiled.fill):
            self._note("compiled", self.spec.engine, "begins with what another node has compiled")
        await self._supervisor.run()

    def _prepared(self, spec: AgentSpec) -> Callable[[], None]:
        def take_over() -> None:
            self._guard.take_over(_trust_of(spec), self._clock.monotonic())
            self.mesh.dial([(hub.host, hub.port) for hub in spec.hubs], spec.egress)

        return take_over

    async def _measure(self) -> None:
        """In a thread: all files of the package are read, from a shared file system perhaps."""
        try:
            self._build = await asyncio.to_thread(signed_build, package_folder())
        except FabrictoolError as error:
            self._note("unsigned-build", self.spec.replica, str(error))

    async def _link_site(self) -> None:
        """Listen for the agents of our site; where that cannot be done, gateways are all that there is."""
        if self.spec.site_links is False or not self.spec.hubs:
            return
        try:
            host = await own_address(self.spec.hubs)
            self._addresses = (f"{host}:{await self.mesh.listen(host, 0)}",)
        except (OSError, FabrictoolError) as error:
            self._note("no-site-links", self.spec.replica, str(error))
            return
        self._note("site-links", self.spec.replica, f"listens on {self._addresses[0]} for agents of {self.spec.site}")
        self.mesh.link_site()
        self._publish_node(self._node_lifecycle)

    def _count(self, head: StreamHead) -> None:
        if head.tenant:
            name = f"{head.group[:80]}/{head.tenant}"
            self._requests_of[name] = self._requests_of.pop(name, 0) + 1
            if len(self._requests_of) > TENANTS_KEPT:
                del self._requests_of[next(iter(self._requests_of))]

    async def _until_unasked(self) -> str:
        """Until nobody has asked for so long that the replica may end; returns why. In ages, where it may not."""
        while True:
            now, after = self._clock.monotonic(), self._watch.spec.idle_after_s
            if self._in_flight or self._supervisor.state != "ready":
                self._asked_at = now
            left = math.inf if isinstance(after, msgspec.UnsetType) else self._asked_at + after - now
            if left <= 0:
                reason = f"nobody asked for {self.spec.model} for {duration_text(now - self._asked_at)}"
                self._note("dormant", self.spec.replica, reason)
                return reason
            await asyncio.sleep(min(left, UNASKED_LOOK_S))

    async def _until_end(self) -> str:
        """Until it is time to leave, of the allocation or of the certificate, whichever ends first; returns why."""
        begun = self._clock.wall()
        while True:
            now, allocation, ends = self._clock.wall(), self.ends_at, self.certificate_ends_at
            margin = min(CLOCK_SKEW_S, max(0.0, ends - begun) / 10)  # a gateway's clock may be ahead of ours
            leaves = ends - margin if ends else math.inf  # without a time it is not valid, and nobody links to it
            by_certificate = leaves < (math.inf if allocation is None else allocation)
            end = leaves if by_certificate or allocation is None else allocation
            left = end - self.spec.drain_s - LEAVE_S - now
            soon = by_certificate and ends - now < CERTIFICATE_WARNING_S
            if soon and not self._warned:
                self._note("certificate-ends", self.mesh.session.hex()[:8], self._certificate_text())
            self._warned = soon
            if left <= 0 and by_certificate:
                return "the session's certificate ends soon"
            if left <= 0:
                self._note("walltime", self.spec.replica, f"ends in {self.spec.drain_s + LEAVE_S:.0f} s")
                return "the walltime ends soon"
            await asyncio.sleep(min(left, WATCH_S))

    def _certificate_text(self) -> str:
        left = duration_text(max(0.0, self.certificate_ends_at - self._clock.wall()))
        joined = not isinstance(self.spec.brought, msgspec.UnsetType)
        what = "join again with a new session" if joined else "`fabrictool reconcile` gives it another one"
        return f"the session's certificate ends in {left}, and this agent leaves before that: {what}"

    async def _quantify(self, at: EngineAddress) -> None:
        """Learn how long the steps of the engine take, where routing goes by that."""
        budget = self._watch.spec.measure_s
        if isinstance(budget, msgspec.UnsetType):
            return
        self._supervisor.progress = "measures how long its steps take"
        async with at.http(budget) as http:
            path = self._adapter.capabilities.version_path
            version = await version_of(http, f"{at.url}{path}") if path else ""
            endpoint = EngineEndpoint(http, at.url, self._supervisor.model, self._clock, random.Random())
            quantifier = Quantifier(endpoint, self._clock, budget, steps_file(self._cache, self.spec, version))
            self._measured = await quantifier.run(self.spec.context, self.spec.max_num_seqs * self.spec.dp)
        self._note("measured", self.spec.replica, self._measured.words())

    def _command(self, at: EngineAddress, ports: PortBlock) -> EngineCommand:
        self._measured = None
        option = self._adapter.capabilities.priority_option
        wanted = self._watch.spec.priorities is True and bool(option)
        self._by_priority = wanted and self.spec.options.get(option, "priority") == "priority"
        return self._adapter.command(
            launch_of(
                self.spec,
                model=self._model_path,
                at=at,
                ports=ports,
                python=self._python,
                cache=self._cache,
                compiled=self._compiled.folder,
                node=None if self._leader is None else first_node(self._leader.nodes, self._leader.meets_at),
                handover=self._pair.handover(ports.handover),
                command=self._brought.command,
                by_priority=self._by_priority,
            )
        )

    async def _lead(self, leader: Leader) -> None:
        """Raises FT7108 where the other nodes could not find us."""
        try:
            await leader.listen(await own_address(self.spec.hubs))
        except OSError as error:
            message = f"{self.spec.replica}: cannot listen for its other nodes: {error}"
            raise FabrictoolError.of("FT7108", message, thing=f"replica/{self.spec.replica}") from error

    def _leader_of(self, folder: RunFolder) -> Leader:
        files, notice = IdentityFiles(folder.identity), folder.path / LEADER
        return Leader(self.spec.on_nodes, files, notice, self._note, come_s=self.spec.start_timeout_s)

    def _request_finished(self, gateway: bytes) -> None:
        self._asked_at = self._clock.monotonic()
        self._in_flight -= 1
        self._in_flight_of[gateway] -= 1
        self._in_flight_of = +self._in_flight_of  # forgets gateways with none
        if self._in_flight == 0:
            self._idle.set()

    def _engine_moved(self) -> None:
        """Each start of the engine is a service of its own; DOWN is final for it."""
        state = self._supervisor.state
        self._note(f"engine-{state}", self.spec.engine, self._supervisor.progress)
        if state == "loading":
            self._begin_service()
            self._publish_service(Lifecycle.JOIN)
        elif state == "ready":
            self._publish_service(Lifecycle.SERVING)
            if self._node_lifecycle is Lifecycle.JOIN:
                self._publish_node(Lifecycle.SERVING)
            self._keeping = self._keeping or asyncio.create_task(asyncio.to_thread(self._compiled.keep))
        elif state in ("unhealthy", "failed") and self._service:
            self._publish_service(Lifecycle.DOWN)

    def _begin_service(self) -> None:
        seed = self.mesh.session + secrets.token_bytes(8)
        self._service = hashlib.sha256(seed).digest()[:16]

    async def _drain(self) -> None:
        """Accept nothing more, and let open requests finish."""
        self._accepting = False
        self._signs.touch()
        if self._service and self._service_lifecycle is Lifecycle.SERVING:
            self._publish_service(Lifecycle.SERVING)
            try:
                async with asyncio.timeout(self.spec.drain_s):
                    await self._idle.wait()
            except TimeoutError:
                self._note(
                    "drain", self.spec.replica, f"{self._in_flight} requests cut after {self.spec.drain_s:.0f} s"
                )

    async def _leave(self) -> None:
        await self._drain()
        self._drained = True  # who asks now is told at once, and asks elsewhere: nothing is cut off with the engine
        try:
            if self._service and self._service_lifecycle < Lifecycle.DOWN:
                self._publish_service(Lifecycle.DOWN)
            self._publish_node(Lifecycle.LEFT)
        finally:
            if not await self.mesh.leave():
                _log.warning("left without every gateway's acknowledgement")

    def _publish_node(self, lifecycle: Lifecycle) -> None:
        self._node_lifecycle = lifecycle
        body = self._node_body(lifecycle)
        self.mesh.publish(msgspec.structs.replace(body, addresses=self._addresses, build=self._build))

    def _node_body(self, lifecycle: Lifecycle) -> NodeBody:
        return node_body(self.spec, self.mesh.federation, self.mesh.session, lifecycle, self.ends_at)

    def _publish_service(self, lifecycle: Lifecycle) -> None:
        if not self._supervisor.model:  # the engine has yet to say what it serves
            return
        self._service_lifecycle = lifecycle
        body = self._service_body(lifecycle, self._supervisor.model)
        if lifecycle is Lifecycle.DOWN:
            body = with_note(body, self._supervisor.progress)
            self.mesh.confide(self._service, list(self._supervisor.lines)[-TAIL_LINES:])
        self.mesh.publish(body)

    def _service_body(self, lifecycle: Lifecycle, model: str) -> ServiceBody:
        mesh = self.mesh
        body = service_body(self.spec, mesh.federation, mesh.session, self._service, lifecycle, model)
        body = msgspec.structs.replace(
            body, accepting=self._accepting, meets_at=self._pair.meets_at, by_priority=self._by_priority
        )
        measured = self._measured if lifecycle is Lifecycle.SERVING else None
        return body if measured is None else with_steps(body, measured.steps)

    def _note(self, kind: str, subject: str, text: str) -> None:
        self._events.append(Event(at=self._clock.wall(), kind=kind, subject=subject, text=text))
        self._signs.touch()
        _log.info("%s %s %s", kind, subject, text)


def _trust_of(spec: AgentSpec) -> AgentTrust:
    return AgentTrust() if isinstance(spec.trust, msgspec.UnsetType) else spec.trust


async def cancelled(*tasks: asyncio.Task[Any]) -> None:
    """Cancel them, and wait until they are over, however they end."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
