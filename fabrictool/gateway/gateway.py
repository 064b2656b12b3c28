"""The gateway: who asks, where it may go, and what this gateway knows of the fabric.

One object serves both forms: on the mesh's registry (`mesh` given), and on a static list (`targets` given).
Longer than most modules: what a request needs of it stands in one compiled class, and that is asked for each request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Final, cast

import msgspec

from fabrictool import __version__
from fabrictool.base.errors import FabrictoolError
from fabrictool.base.listening import Listening
from fabrictool.base.openfiles import open_files
from fabrictool.engines.paths import CHAT_PATHS, MODEL_PATHS
from fabrictool.gateway.accounts import KeyAccounts, Ticket
from fabrictool.gateway.admission import Admission, priority_within
from fabrictool.gateway.clienttls import LOOK_S
from fabrictool.gateway.directory import Directory, RoutingTarget
from fabrictool.gateway.exchange import CLIENT_GONE, Exchange
from fabrictool.gateway.following import MeshFollower
from fabrictool.gateway.http import ClientConnection, ClientRequest, Handler
from fabrictool.gateway.metrics import GatewayMetrics
from fabrictool.gateway.modellist import model_answer, model_in, models_answer, models_for
from fabrictool.gateway.modelrequest import PASSED_HEADERS, ModelRequest, bearer, passed_on
from fabrictool.gateway.moving import Streams
from fabrictool.gateway.openai import (
    GatewayResponse,
    Peek,
    error_response,
    no_such_key,
    not_allowed,
    nothing_at,
    peek,
    renamed,
)
from fabrictool.gateway.options import PROVIDERS_HEADER, RequestOptions
from fabrictool.gateway.outbox import Outbox
from fabrictool.gateway.pursewait import PurseWait
from fabrictool.gateway.records import RequestRecord
from fabrictool.gateway.rooms import exchange_for
from fabrictool.gateway.tracecontext import trace_context
from fabrictool.gateway.tracing import RecordSink, Tracer
from fabrictool.gateway.upstream import NOBODY, Caller
from fabrictool.gateway.usage import with_usage
from fabrictool.gateway.view import as_tenant, model_row
from fabrictool.gateway.waking import Waking
from fabrictool.mesh.framing import TEXT_CHARACTERS
from fabrictool.routing.admission import STANDARD
from fabrictool.routing.affinity import conversation_of
from fabrictool.status.documents import Event, GatewayStatus, HandedRow, encode
from fabrictool.status.pages import METRICS_TYPE
from fabrictool.workload.prefixes import LEAST, PrefixTable

if TYPE_CHECKING:
    import random
    import socket
    from collections.abc import Callable, Iterable, Mapping

    from fabrictool.base.clock import Clock
    from fabrictool.domain.specs import WakeRule
    from fabrictool.domain.terms import KeyLimits
    from fabrictool.gateway.answering import Answering
    from fabrictool.gateway.calls import PathOwner
    from fabrictool.gateway.clienttls import ClientTls
    from fabrictool.gateway.issued import IssuedKeys
    from fabrictool.gateway.keys import Consumer, Keyring
    from fabrictool.gateway.records import End
    from fabrictool.gateway.rules import RoutingRules
    from fabrictool.gateway.spool import RecordSpool
    from fabrictool.mesh.transport.node import MeshNode
    from fabrictool.routing.protocol import RoutingPolicy

_log = logging.getLogger("fabrictool.gateway")

TICK_S: Final = 1.0
HANDSHAKE_S: Final = 10.0
OWN_FILES: Final = 64
"""Open beside those of requests."""
FILL_S: Final = 30.0
"""After its start a gateway answers 503 for models that it does not know: by then its agents have dialled again."""
EVENTS_KEPT: Final = 200


class GatewayServer(Handler):
    """Handles requests; `ClientConnection` and `Exchange` do the bytes."""

    def __init__(
        self,
        clock: Clock,
        *,
        fabric: str,
        rules: RoutingRules,
        keyring: Keyring | None,
        targets: Iterable[RoutingTarget] = (),
    ) -> None:
        self._clock, self._fabric = clock, fabric
        self._rules = rules
        self._makes_room = rules.makes_room is not None
        self._keyring = keyring
        self.accounts = KeyAccounts(clock, fabric)
        self.know_keys()
        self.directory = Directory(rules.weights, rules.group_weights)
        self.directory.replace(targets)
        self._metrics = GatewayMetrics()
        self._metrics.watch(self.directory)
        self._metrics.patience.declare(rules.patience)
        self._admission = Admission()
        self._streams, self._outbox = Streams(), Outbox()
        self.waking = Waking(clock, self.directory)
        self.sinks: list[Callable[[RequestRecord], object]] = []
        """Who is told what became of each request, beside the spool."""
        self._spool: RecordSpool | None = None
        self._ended: RecordSink = self._record
        self._opt_out = False
        self._tracer: Tracer | None = None
        self._prefixes = PrefixTable()
        self._owners: tuple[PathOwner, ...] = ()
        self._issued: IssuedKeys | None = None
        self.connections: set[ClientConnection] = set()
        """Of the clients that are here now."""
        self._most_clients = 0
        self._events: deque[Event] = deque(maxlen=EVENTS_KEPT)
        self.follower = MeshFollower(clock, self.directory, lambda: self._rules.attestation, self.note)
        self._started = self._looked_at_tls = clock.monotonic()
        self._born = int(clock.wall())
        self.listening = Listening(self._connection)
        self._tick: asyncio.Task[None] | None = None
        self.draining = False
        """Nothing new is accepted, for good or until a successor turns out to have failed."""
        self.ending = False
        """Connections without a request are closed."""
        self._left = asyncio.Event()
        """Set whenever a client leaves."""
        self._tls: ClientTls | None = None
        self.listen_address = ""
        self.mesh_address = ""
        self.spec_mark = ""
        """Of the spec that is in force."""
        self._ids = f"-{secrets.token_urlsafe(8)}"
        self._next_id = 0

    # -- lifecycle --------------------------------------------------------------------------------------------

    def join(self, mesh: MeshNode) -> None:
        """Follow this mesh node's registry from now on."""
        self.follower.mesh = mesh
        # Soon, for the directory is in the middle of a change when it says so.
        self.directory.arrived = self._came
        self.directory.loading = lambda: mesh.registry.loading(mesh.reached)
        self.directory.filling_until = self._clock.monotonic() + FILL_S

    def label(self, labels: Mapping[str, tuple[str, ...]]) -> None:
        """What the inventory says of nodes, by `label_key`."""
        self.directory.label(labels)

    def plan_for(self, replicas: Mapping[str, tuple[int, ...]]) -> None:
        """Model → numbers of the replicas that it should have: what is missed, and what is worth waiting for."""
        self.directory.planned = replicas

    def stand_on(self, bases: Mapping[str, str]) -> None:
        """Adapter → the model with which it is served, and whose limits count for it."""
        self.directory.bases = self.accounts.bases = bases

    def count_caches(self, octets: Mapping[str, float]) -> None:
        """Model whose caches are handed over → octets of one token's."""
        self.directory.cache_octets = octets

    def wake_for(self, rules: Mapping[str, WakeRule]) -> None:
        """Models whose replicas may have ended for want of requests."""
        self.waking.rules = rules

    def reload(self, rules: RoutingRules, keyring: Keyring | None, limits: Mapping[str, KeyLimits]) -> None:
        """Go on by other rules, keys and limits of models; requests that are open end by those that they began with."""
        self._rules, self._keyring = rules, keyring
        self._makes_room = rules.makes_room is not None
        self._attach()
        self.know_keys()
        self.accounts.limit_models(limits)
        self._metrics.patience.declare(rules.patience)
        self.directory.weigh(rules.weights, rules.group_weights)
        self.follower.follow_all()

    def issue_keys(self, issued: IssuedKeys, *owners: PathOwner) -> None:
        """Accept these keys; `owners` answer to those who make them."""
        self._issued, self._owners = issued, owners
        self._attach()

    def _attach(self) -> None:
        if self._keyring is not None:
            self._keyring.more = self._issued
            for owner in self._owners:
                owner.attach(self._keyring)

    def know_keys(self) -> None:
        """Go by the terms that the keys have now."""
        self.accounts.change_terms({} if self._keyring is None else self._keyring.accounts)

    @property
    def routing_policy(self) -> RoutingPolicy:
        return self._rules.routing_policy

    def record_in(self, spool: RecordSpool, *, opt_out: bool) -> None:
        """Keep a record of each request there; with `opt_out` of none whose client asks for that."""
        self._spool = spool
        self._metrics.watch_spool(spool)
        self._opt_out = opt_out

    def trace(self, share: float, rng: random.Random) -> Tracer:
        """Make spans of the requests that are recorded, for this `share` of traces."""
        self._tracer = Tracer(share, rng, self._metrics.count_spans)
        return self._tracer

    # Wide: where, by which protocol, and from whom.
    async def listen(
        self,
        host: str,
        port: int,
        tls: ClientTls | None = None,
        sockets: Iterable[socket.socket] = (),
        *,
        shared: bool = False,
    ) -> None:
        """Accept clients, perhaps at `sockets` of another process; `shared`: other workers accept at the address, too.
        Raises FT8004 when the address cannot be used.
        """
        self._tls = tls
        self._most_clients = max(1, open_files() - OWN_FILES) // 2
        self.listening = Listening(
            self._connection,
            backlog=1024,
            ssl=None if tls is None else tls.context,
            ssl_handshake_timeout=None if tls is None else HANDSHAKE_S,
        )
        try:
            if sockets:
                await self.listening.adopt(sockets, shared=shared)
            else:
                await self.listening.open(host, port, shared=shared)
        except OSError as error:
            raise FabrictoolError.of(
                "FT8004",
                f"cannot listen for clients on {host}:{port}: {(error.strerror or str(error)).lower()}",
                thing=f"{host}:{port}",
                hint="choose another address in the blueprint's gateway section, or stop what holds this one",
            ) from error
        self.listen_address = f"{host}:{self.listening.port}"
        self._tick = asyncio.create_task(self._tick_forever())

    def _connection(self) -> asyncio.Protocol:
        return cast("asyncio.Protocol", ClientConnection(self, self._clock, self._outbox))

    def step_aside(self) -> None:
        """Accept no connection; those that are here get an answer more, and are told to come back by another one."""
        self.listening.pause()
        self.draining = True

    async def come_back(self) -> None:
        """Accept again. Raises OSError."""
        self.draining = False
        await self.listening.resume()

    async def drain(self, seconds: float, *, idle_s: float = 0.0) -> None:
        """Accept nothing new, let open requests finish for that long, then close. Connections without a request are
        closed after `idle_s`.
        """
        self.step_aside()
        self.listening.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._gone(), idle_s)
        self.ending = True
        for connection in list(self.connections):
            connection.close_when_answered()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._gone(), seconds)
        if self._tick is not None:
            self._tick.cancel()
        self._metrics.recounts.close()
        for connection in list(self.connections):
            connection.stop()
        for target in self.directory:
            target.connector.close()

    async def _gone(self) -> None:
        """Until no client is here."""
        while self.connections:
            self._left.clear()
            await self._left.wait()

    # -- Handler, for connections -----------------------------------------------------------------------------

    def opened(self, connection: ClientConnection) -> None:
        self.connections.add(connection)
        connection.surplus = len(self.connections) > self._most_clients
        if self.ending:
            connection.close_when_answered()

    def closed(self, connection: ClientConnection) -> None:
        self.connections.discard(connection)
        self._left.set()

    def admit(self, request: ClientRequest) -> GatewayResponse | None:
        """Key, method, path and the headers that would be passed on: all that a head alone decides."""
        path, reads = request.path, request.method in ("GET", "HEAD")
        if reads and path == "/health":
            return None
        for owner in self._owners:
            if owner.serves(path):
                return owner.admit(request)
        if self._keyring is not None:
            authorization = request.header("authorization") or bearer(request.header("x-api-key"))
            request.consumer = self._keyring.consumer(authorization)
            if request.consumer is None or request.consumer.expired(self._clock):
                return no_such_key(self._keyring, authorization, path, expired=request.consumer is not None)
        if not reads and not (request.method == "POST" and path in MODEL_PATHS):
            if path in MODEL_PATHS or path.startswith(("/v1/models", "/status", "/metrics", "/health")):
                return not_allowed(request.method, path, "POST" if path in MODEL_PATHS else "GET, HEAD")
            return nothing_at(path)
        if request.head_octets > TEXT_CHARACTERS:
            for name, value in request.fields.items():
                if len(value) > TEXT_CHARACTERS and name in PASSED_HEADERS:
                    text = f"the header {name} is over {TEXT_CHARACTERS} octets"
                    return error_response(431, "FT8108", text, path=path)
        return None

    def refused(self, status: int) -> None:
        """Counted, and not recorded: anybody can send such requests."""
        self._metrics.refused(status)

    def new_id(self) -> str:
        """Unique among all gateways."""
        number = self._next_id
        self._next_id = number + 1
        return f"{number}{self._ids}"

    def handle(self, request: ClientRequest, connection: ClientConnection) -> GatewayResponse | Answering:
        """The answer to a request, or the exchange that will make it."""
        for owner in self._owners:
            if owner.serves(request.path):
                return owner.call(request, connection)
        if request.method in ("GET", "HEAD"):
            return self._get(request.path, request.consumer)
        return self._ask(request, connection)

    # -- answers ----------------------------------------------------------------------------------------------

    def _get(self, path: str, consumer: Consumer | None) -> GatewayResponse:
        if path == "/health":
            if self.draining:  # a proxy in front sends what is new elsewhere
                return GatewayResponse(503, b'{"status":"stopping"}')
            return GatewayResponse(200, b'{"status":"ok"}')
        group = consumer.group if consumer is not None else None
        tenant, trust = consumer is not None, self._rules.trust
        if path == "/metrics" and not tenant:
            return GatewayResponse(200, self.exposition(), METRICS_TYPE)
        if path == "/status":
            status = self.status()
            if tenant:
                status = as_tenant(status, lambda provider, model: trust.permits(provider, model, group, None))
            return GatewayResponse(200, encode(status))
        if path == "/v1/models":
            return models_answer(models_for(consumer, self.directory, self._rules, self.waking, self._born))
        if path.startswith("/v1/models/"):
            models = models_for(consumer, self.directory, self._rules, self.waking, self._born)
            name = model_in(path, self._rules)
            return model_answer(name, models, may_come=trust.sees(group, name) and self._may_come(name))
        wrong = not_allowed("GET", path, "POST") if path in MODEL_PATHS else nothing_at(path)
        self._metrics.refused(wrong.status)
        return wrong

    def _may_come(self, model: str) -> bool:
        return self.directory.may_come(model, self._clock.monotonic())

    # Long: the way of each request, of which every call is a part of its price.
    def _ask(self, request: ClientRequest, connection: ClientConnection) -> GatewayResponse | Exchange | PurseWait:
        """Of a replica of the model that the body names."""
        options = request.options
        if options is None:
            options = request.options = RequestOptions(request.fields, request.values(PROVIDERS_HEADER))
        body, path, began = request.body, request.path, self._clock.wall()
        consumer = request.consumer
        record_id = self.new_id() if options.named else connection.request_id
        kept = not (self._opt_out and options.unrecorded)
        peeked = peek(body, path)
        if options.wrong is not None:
            peeked = error_response(400, *options.wrong, path=path)
        if not isinstance(peeked, GatewayResponse) and peeked.model in self._rules.aliases:
            peeked, body = renamed(peeked, body, self._rules.aliases[peeked.model], path)
        told = peeked if isinstance(peeked, GatewayResponse) else _with_figures(peeked, body, path, options)
        if isinstance(peeked, GatewayResponse) or isinstance(told, GatewayResponse):
            return self._refused(record_id, began, path, consumer, "", cast("GatewayResponse", told), kept=kept)
        ticket = self.accounts.admit(consumer, peeked, path, body, self.directory)
        if ticket is not None and not isinstance(ticket, Ticket):
            known = peeked.model if peeked.model in self.follower.known else ""
            if isinstance(ticket, GatewayResponse):
                return self._refused(record_id, began, path, consumer, known, ticket, kept=kept)
            again = partial(self._ask, request, connection)
            refused = partial(self._refused, record_id, began, path, consumer, known, kept=kept)
            return PurseWait(ticket.refusal, connection, self.accounts.after_turn, again, refused)
        try:
            return self._begun(request, connection, peeked, told, ticket, record_id, began, kept=kept)
        except Exception:
            if ticket is not None:  # what it took of limits and budget would be gone for good
                ticket.give_back()
            raise

    # Wide: what is known of the request by now.
    def _begun(
        self,
        request: ClientRequest,
        connection: ClientConnection,
        peeked: Peek,
        told: tuple[bytes, bool, bool],
        ticket: Ticket | None,
        record_id: str,
        began: float,
        *,
        kept: bool,
    ) -> Exchange:
        """What was admitted goes on its way; `told`: see `_with_figures`."""
        consumer, options = request.consumer, cast("RequestOptions", request.options)
        sent, ours, goes_on = told
        prefix_of, prefix_share = "", 0.0
        if len(sent) >= LEAST and kept and (self.sinks or self._spool is not None):
            prefix_of, prefix_share = self._prefixes.add(peeked.model, peeked.text, record_id)
        trace = None
        if options.traced:
            trace = trace_context(request.values("traceparent"), request.values("tracestate"))
        ended: RecordSink = self._ended if kept else self._forget
        if kept and self._tracer is not None:
            trace, ended = self._tracer.begin(trace, ended)
        asked = ModelRequest(
            model=peeked.model,
            method=request.method,
            path=request.target,
            headers=passed_on(connection.request_id, trace, options.passed),
            body=sent,
            group=consumer.group if consumer is not None else None,
            requested=options.requested,
            required=options.required,
            caller=self._caller(consumer),
            conversation=self._conversation(peeked, consumer),
            follows=peeked.previous_response_id,
            stream=peeked.stream,
            continues=goes_on,
            added_usage=ours,
            record_id=record_id,
            tenant=consumer.tenant if consumer is not None else "",
            key=consumer.key if consumer is not None else "",
            at=began,
            prefix_of=prefix_of,
            prefix_share=prefix_share,
            most_tokens=peeked.most_tokens,
            priority=priority_within(self._best_class(consumer), options.priority),
            max_wait_s=options.max_wait_s,
            ranks_itself=peeked.ranks_itself,
        )
        return self._exchange(connection, asked, ended, ticket)

    def _exchange(
        self, connection: ClientConnection, asked: ModelRequest, ended: RecordSink, ticket: Ticket | None
    ) -> Exchange:
        rules, directory, metrics, waking = self._rules, self.directory, self._metrics, self.waking
        admission = self._admission if rules.admission else None
        if directory.in_rooms or directory.split:
            kind = exchange_for(asked.model, directory)
            if kind is not Exchange:
                return kind(connection, asked, rules, directory, metrics, ended, admission, waking, None, ticket)
        streams = self._streams if self._makes_room else None
        return Exchange(connection, asked, rules, directory, metrics, ended, admission, waking, streams, ticket)

    def _best_class(self, consumer: Consumer | None) -> int | None:
        """The most important one that its requests may have; None: any."""
        if consumer is None:
            return None
        return self._rules.priority_limit(consumer.tenant) if self._rules.priorities else STANDARD

    # Wide: what a record of it says.
    def _refused(
        self,
        record_id: str,
        at: float,
        path: str,
        consumer: Consumer | None,
        model: str,
        answer: GatewayResponse,
        *,
        kept: bool,
    ) -> GatewayResponse:
        """With a record that no exchange writes, if it is to be `kept`."""
        tenant, key = (consumer.tenant, consumer.key) if consumer is not None else ("", "")
        end: End = "cancelled" if answer.status == CLIENT_GONE else "refused"
        took_s = max(0.0, self._clock.wall() - at)  # clocks are set back
        record = RequestRecord(record_id, at, path, answer.status, end, took_s, tenant, key, model)
        self._metrics.count(record)
        if kept:
            self._record(record)
        return answer

    def _conversation(self, peeked: Peek, consumer: Consumer | None) -> int | None:
        """Which replica may have its beginning in the cache; None: it has none to go by, or that is not wanted."""
        beginning = peeked.beginning if self._rules.affinity else b""
        return conversation_of(consumer.tenant if consumer is not None else "", beginning) if beginning else None

    def _caller(self, consumer: Consumer | None) -> Caller:
        """As agents may know it; servers of a static list are told nothing."""
        if self.follower.mesh is None or self._keyring is None or consumer is None:
            return NOBODY
        return Caller(consumer.group or "", self._keyring.pseudonym(consumer.tenant))

    def _record(self, record: RequestRecord) -> None:
        """What became of a request."""
        if self._spool is not None:
            self._spool.append(record)
        for sink in self.sinks:
            sink(record)

    def _forget(self, record: RequestRecord) -> None:
        """Of a request that is not to be recorded nothing is left but the counters."""

    # -- status -----------------------------------------------------------------------------------------------

    def exposition(self) -> bytes:
        slow = sum(connection.writing_paused for connection in self.connections)
        waiting = self._admission.waiting()
        return self._metrics.exposition(clients=len(self.connections), slow_clients=slow, waiting=waiting)

    def status(self) -> GatewayStatus:
        metrics, mesh, now = self._metrics, self.follower.mesh, self._clock.wall()
        metrics.fold()
        nodes = self.follower.rows()
        return GatewayStatus(
            release=__version__,
            at=now,
            started_at=now - (self._clock.monotonic() - self._started),
            fabric=self._fabric,
            session=mesh.session.hex() if mesh is not None else "",
            listen=self.listen_address,
            tls=self._tls is not None,
            mesh=self.mesh_address,
            policy=self._rules.routing_policy.name,
            spec=self.spec_mark,
            nodes=nodes,
            models=[
                model_row(name, nodes, self.directory, metrics, self.waking)
                for name in sorted(self.follower.known | self.directory.planned.keys())
            ],
            totals=metrics.totals(in_flight=sum(target.in_flight for target in self.directory)),
            registry_records=len(mesh.registry) if mesh is not None else 0,
            registry_root=mesh.registry.root().hex() if mesh is not None else "",
            handed=[
                HandedRow(model=model, sender=sender, receiver=receiver, prompts=n, tokens=tokens, octets=round(octets))
                for (model, sender, receiver), (n, tokens, octets) in sorted(metrics.crossed.items())
            ],
            events=list(self._events),
        )

    # -- internals --------------------------------------------------------------------------------------------

    async def _tick_forever(self) -> None:
        while True:
            due = self._clock.monotonic() + TICK_S
            await asyncio.sleep(TICK_S)
            self._metrics.lag_s = max(self._metrics.lag_s, self._clock.monotonic() - due)
            for look in (
                self._metrics.fold,
                self._fade,
                self._expire,
                self._admission_tick,
                self.follower.warn_of_certificates,
                self._look_at_tls,
            ):
                try:
                    look()
                except Exception:  # noqa: BLE001 - without these looks nothing would ever be given up
                    _log.exception("%s failed", look.__name__)

    def _fade(self) -> None:
        self._metrics.retry_budget.tick(self._clock.monotonic())

    def _expire(self) -> None:
        for connection in list(self.connections):
            connection.expire()

    def _admission_tick(self) -> None:
        self._admission.tick(self._clock.monotonic())
        self.waking.tick(self._admission.queued)

    def _came(self, model: str) -> None:
        if model in self.waking.rules:
            asyncio.get_running_loop().call_soon(self.waking.came, model)

    def _look_at_tls(self) -> None:
        now = self._clock.monotonic()
        if self._tls is not None and now - self._looked_at_tls > LOOK_S:
            self._looked_at_tls = now
            if told := self._tls.look():
                self.note("client-certificate", self.listen_address, told)

    def note(self, kind: str, subject: str, text: str) -> None:
        self._events.append(Event(at=self._clock.wall(), kind=kind, subject=subject, text=text))
        _log.info("%s %s %s", kind, subject, text)


def _with_figures(
    peeked: Peek, body: bytes, path: str, options: RequestOptions
) -> tuple[bytes, bool, bool] | GatewayResponse:
    """The body with the wish for figures, where it is for a stream; whether that wish is ours, and whether another
    replica may go on with it: then each event has to say how much was said.
    """
    if not peeked.stream or path not in CHAT_PATHS or (peeked.tells_usage and not options.continues):
        return body, False, False
    try:
        sent = with_usage(body, options=peeked.names_options, always=options.continues)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:  # in a part that nobody looked at before
        return error_response(400, "FT8101", f"the body is not valid JSON: {error}", path=path)
    return sent, not peeked.tells_usage, options.continues
