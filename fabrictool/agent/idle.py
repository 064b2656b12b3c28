"""An agent that begins without a model: it says what its node has, and serves what its provider's controller assigns.

What may be started here is decided here. An assignment names an engine, a source and a few sizes; the command line is
this agent's own making (`engines`), and what the node's owner does not allow is refused and said.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import msgspec

from fabrictool.agent.agent import Agent, cancelled
from fabrictool.agent.bodies import node_body
from fabrictool.agent.hardware import read_hardware
from fabrictool.agent.supervisor import Supervisor
from fabrictool.base.errors import FabrictoolError, InvalidInputError
from fabrictool.base.ids import is_name
from fabrictool.catalog import engines
from fabrictool.domain.specs import AgentSpec, IdleOffer
from fabrictool.engines.adapter import adapter, engine_names
from fabrictool.engines.artifacts import resolve
from fabrictool.mesh.records import (
    AssignmentBody,
    Lifecycle,
    NodeHardware,
    RevocationBody,
    assignment_key,
    with_assignment,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fabrictool.base.clock import Clock
    from fabrictool.base.runfolder import RunFolder
    from fabrictool.mesh.records import NodeBody, Record, ServiceBody
    from fabrictool.status.documents import AgentStatus

LOOK_S = 30.0
"""Between two looks at the hardware: others may use the devices, too."""
WORTH_TELLING = 1 / 16
"""Of a device's memory: smaller changes are no news for every node of the federation."""


class IdleAgent(Agent):
    """One run of one agent that takes assignments: one session, no replica or one at a time."""

    # Wide: as its parent, and where the hardware is read.
    def __init__(
        self,
        spec: AgentSpec,
        folder: RunFolder,
        clock: Clock,
        *,
        python: str,
        cache: Path,
        ends_at: float | None = None,
        look: Callable[[], NodeHardware] = lambda: read_hardware(os.environ),
    ) -> None:
        super().__init__(spec, folder, clock, python=python, cache=cache, ends_at=ends_at)
        self._bare = spec
        self._bare_supervisor = self._supervisor
        self._bare_adapter = self._adapter
        self._look = look
        self._hardware: NodeHardware | None = None
        self._heard = asyncio.Event()
        """What is assigned to us may be another now."""
        self._running = False
        """Whether there is an engine, or will be in a moment."""
        self._last_told: AssignmentBody | None = None
        self._newest = 0
        """Version of the newest assignment that was heard."""
        self._leaving = False
        self._follows = False
        """Whether that one names a model, and was not taken back."""
        self._followed: AssignmentBody | None = None
        """By the engine start that is the last."""
        self._given_up = False

    def record_changed(self, record: Record) -> None:
        body = record.body
        ours = isinstance(body, AssignmentBody) and body.session == self.mesh.session
        if ours or isinstance(body, RevocationBody):
            self._heard.set()

    def status(self) -> AgentStatus:
        status = super().status()
        if self._running:
            return status
        engine = msgspec.structs.replace(status.engine, engine="", state="stopped", progress="")
        return msgspec.structs.replace(status, engine=engine, idle=True)

    # -- internals --------------------------------------------------------------------------------------------

    @property
    def _has_engine(self) -> bool:
        return self._running

    def _node_body(self, lifecycle: Lifecycle) -> NodeBody:
        spec, hardware = self._bare, self._hardware
        body = node_body(spec, self.mesh.federation, self.mesh.session, lifecycle, self.ends_at, hardware)
        return msgspec.structs.replace(body, heard=self._newest, follows=self._follows)

    def _service_body(self, lifecycle: Lifecycle, model: str) -> ServiceBody:
        body = super()._service_body(lifecycle, model)
        body = msgspec.structs.replace(body, given_up=self._given_up)
        return with_assignment(body, self._followed) if self._followed is not None else body

    async def _leave(self) -> None:
        self._leaving = True
        await super()._leave()

    async def _serve(self) -> None:
        await self._look_at_hardware()
        looking = asyncio.create_task(self._keep_looking())
        try:
            while not self._leaving:
                await self._follow(self._told())
            await asyncio.Event().wait()  # whoever leaves drains and stops what runs
        finally:
            await cancelled(looking)

    def _told(self) -> AssignmentBody | None:
        """What we are to serve; None: nothing."""
        registry, session = self.mesh.registry, self.mesh.session
        # A renewed session may outlive its controller, and then the record is gone: nothing else was said.
        if registry.get(assignment_key(session)) is not None:
            self._last_told = registry.assignment(session)
        told = self._last_told
        wanted = told if told is not None and told.model else None
        newest, follows = max(self._newest, told.version if told is not None else 0), wanted is not None
        if (newest, follows) != (self._newest, self._follows) and not self._leaving:
            self._newest, self._follows = newest, follows
            self._publish_node(self._node_lifecycle)  # so that none that came before counts any more
        return wanted

    async def _follow(self, wanted: AssignmentBody | None) -> None:
        """Serve it until something else is wanted. One that failed is tried again when it is assigned again."""
        self._running = wanted is not None
        engine = asyncio.create_task(self._run(wanted)) if wanted is not None else None
        try:
            while self._told() == wanted and not self._leaving:
                self._heard.clear()
                await self._until_heard(engine)
                if engine is not None and wanted is not None and engine.done():
                    try:
                        await engine
                    except FabrictoolError as error:
                        await self._give_up(wanted, error)
                    engine = None
            if wanted is not None and not self._leaving:
                await self._put_down(wanted, engine)
        finally:
            if engine is not None:
                await cancelled(engine)

    async def _until_heard(self, engine: asyncio.Task[None] | None) -> None:
        """Or until the engine is over."""
        heard = asyncio.create_task(self._heard.wait())
        try:
            await asyncio.wait({heard, engine or heard}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            heard.cancel()

    async def _run(self, wanted: AssignmentBody) -> None:
        """Until cancelled; raises when it may not, or cannot, be served."""
        self._note("assigned", wanted.model, f"version {wanted.version}, by {wanted.by.hex()[:8]}")
        self._followed = wanted
        self.spec = assigned_spec(self._bare, wanted)
        self._supervisor = self._supervisor_of(wanted)  # knows the model, should the rest be refused
        check_offer(wanted, self._bare, self._hardware)
        self._adapter = adapter(wanted.engine)
        self._model_path = await asyncio.to_thread(resolve, wanted.source)
        self._supervisor = self._supervisor_of(wanted)
        await self._supervisor.run()

    def _supervisor_of(self, wanted: AssignmentBody) -> Supervisor:
        timeout = self._bare.start_timeout_s
        return Supervisor(self._adapter, self._command, wanted.model, self._engine_moved, start_timeout_s=timeout)

    async def _give_up(self, wanted: AssignmentBody, error: FabrictoolError) -> None:
        self._note("assignment-failed", wanted.model, str(error))
        await self._supervisor.stop()
        self._running, self._given_up = False, True
        if not self._service:  # it came to no start
            self._begin_service()
        self._supervisor.progress = str(error)
        self._publish_service(Lifecycle.DOWN)

    async def _put_down(self, wanted: AssignmentBody, engine: asyncio.Task[None] | None) -> None:
        """Drain, stop, withdraw: who is idle by the records has its devices free again, and says so."""
        if self._running:
            await self._drain()
        if engine is not None:
            await cancelled(engine)  # it would start again what is stopped
        await self._supervisor.stop()
        await self._look_at_hardware()
        if self._leaving:  # meanwhile
            return
        if self._service and self._service_lifecycle < Lifecycle.DOWN:
            self._supervisor.progress = "it was assigned something else"
            self._publish_service(Lifecycle.DOWN)
        self._accepting, self._running, self._given_up = True, False, False
        self._service, self._service_lifecycle, self._followed = b"", Lifecycle.JOIN, None
        self.spec, self._supervisor, self._adapter = self._bare, self._bare_supervisor, self._bare_adapter
        self._note("unassigned", wanted.model, f"version {wanted.version} is over")

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            await self._look_at_hardware()

    async def _look_at_hardware(self) -> None:
        """Tell all when it is another than was told."""
        hardware = await asyncio.to_thread(self._look)
        if self._bare.device:
            hardware = msgspec.structs.replace(hardware, device=self._bare.device)
        if not self._leaving and (self._hardware is None or worth_telling(self._hardware, hardware)):
            self._hardware = hardware
            self._publish_node(Lifecycle.SERVING)


def assigned_spec(bare: AgentSpec, wanted: AssignmentBody) -> AgentSpec:
    """What the agent would have been told, had it been placed."""
    usual = engines()[wanted.engine].default_max_num_seqs if wanted.engine in engines() else bare.max_num_seqs
    return msgspec.structs.replace(
        bare,
        replica=bare.replica if wanted.unit is None else wanted.unit.replica,
        model=wanted.model,
        source=wanted.source,
        engine=wanted.engine,
        precision=wanted.precision,
        context=wanted.context,
        tp=wanted.tp,
        max_num_seqs=wanted.max_num_seqs or usual,
    )


def check_offer(wanted: AssignmentBody, spec: AgentSpec, hardware: NodeHardware | None) -> None:
    """Raises FT7106 when the node's owner does not allow it, or the node has not got what it needs."""
    offer = IdleOffer() if isinstance(spec.idle, msgspec.UnsetType) else spec.idle
    allowed = [name for name in engine_names() if not offer.engines or name in offer.engines]
    devices = hardware.devices if hardware is not None else spec.devices
    if not is_name(wanted.model):  # it stands in a command line, where a dash would begin an option
        raise _refused(f"{wanted.model[:40]!r} cannot be the name of a model", "lower-case letters, digits, . _ -")
    if wanted.engine not in allowed:
        raise _refused(f"engine {wanted.engine[:40]!r} may not be started here", f"allowed: {', '.join(allowed)}")
    if offer.sources and not any(_admits(entry, wanted.source) for entry in offer.sources):
        raise _refused(f"the source {wanted.source[:80]!r} is not allowed here", f"allowed: {', '.join(offer.sources)}")
    if wanted.tp > max(1, devices):
        raise _refused(f"tp is {wanted.tp}, but the node has {devices} devices", "assign it with a smaller tp")


def _admits(entry: str, source: str) -> bool:
    """Whether one entry of an owner's list means this source; no way back up leads out of a folder."""
    if ".." in source or "%" in source:
        return entry == source
    return source.startswith(entry[:-1]) if entry.endswith("*") else entry == source


def worth_telling(told: NodeHardware, now: NodeHardware) -> bool:
    """Whether it differs in more than a little of the memory that is free."""
    if msgspec.structs.replace(told, free=()) != msgspec.structs.replace(now, free=()):
        return True
    if len(told.free) != len(now.free):
        return True
    little = now.memory / max(1, now.devices) * WORTH_TELLING
    return any(abs(before - after) > little for before, after in zip(told.free, now.free, strict=True))


def _refused(message: str, hint: str) -> FabrictoolError:
    return InvalidInputError.of("FT7106", message, hint=hint)
