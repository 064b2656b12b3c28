"""``agent assign``, ``agent unassign``, ``agent keep`` and ``trust controller``, behind their arguments."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from fabrictool.base.clock import SystemClock
from fabrictool.base.errors import FabrictoolError, InvalidInputError, UnreachableError, UsageError
from fabrictool.base.files import file_error
from fabrictool.cli.answers import Assignment
from fabrictool.cli.joining import gateways_of, trust_store
from fabrictool.cli.output import data, json_data, say
from fabrictool.mesh.records import AssignmentBody, Lifecycle
from fabrictool.mesh.transport.controller import AssignmentOutcome, ControllerVisit
from fabrictool.mesh.transport.tls import IdentityFiles
from fabrictool.state.controllers import made_for_once, write_controller

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from fabrictool.cli.source import Source
    from fabrictool.state.truststore import TrustStore
    from fabrictool.status.fleet import FleetMember, FleetQuery

MAX_COUNT = 10_000
LOOK_S = 1.0
"""Between two looks at the own copy of the map."""


@dataclass(frozen=True, slots=True)
class Speaker:
    """Who assigns: where a controller's identity is, or a provider's key to make one with, and where it goes."""

    source: Source
    identity: Path | None
    provider: str
    trust: Path | None
    gateways: Sequence[str]

    @contextlib.contextmanager
    def files(self) -> Iterator[IdentityFiles]:
        """Those that were given, or new ones, for this once, in memory."""
        if self.identity is not None:
            yield IdentityFiles(self.identity)
            return
        store = trust_store(self.trust, self.source)
        provider = self.provider or _only_provider(store)
        with made_for_once(store, provider, now=time.time()) as files:
            yield files


@dataclass(frozen=True, slots=True)
class ModelWords:
    """What is to be served, as far as the command line says."""

    model: str
    source: str = ""
    engine: str = ""
    precision: str = ""
    context: int = 0
    tp: int = 1
    max_num_seqs: int = 0


def new_controller(store: TrustStore, provider: str, folder: Path, days: int) -> None:
    """In a folder that it makes; raises FT4302 when that is there already, and what the trust store does."""
    store.signer(provider)  # else an empty folder would stay behind
    try:
        folder.mkdir(mode=0o700, parents=True)
    except OSError as error:
        raise file_error(error, folder) from error
    files = write_controller(store, provider, folder, days=days, now=time.time())
    session = files.read()[0].claims.session
    say(f"controller {session[:8]} of {provider}, valid for {days} days at most: {folder} (mode 0700)")
    say(f"`fabrictool trust revoke {session}` takes it back")


# Wide: who says what to whom, and how long it is waited for.
def assign(
    speaker: Speaker, session: str, query: FleetQuery, words: ModelWords | None, *, wait_s: float, as_json: bool
) -> None:
    """Print what came of it; without `words` the session becomes idle.

    Raises
    ------
    FabrictoolError
        FT6103 to FT6107 as `ControllerVisit` does, FT6108 when the session gave it up.
    """
    wanted = _wanted(speaker.source, words) if words is not None else _nothing()
    gateways = gateways_of(speaker.source, speaker.gateways)

    async def visit() -> AssignmentOutcome:
        async with ControllerVisit(files, gateways, SystemClock()) as there:
            _warn(there)
            outcome = await there.say(_chosen(there, session, query, wanted), wanted)
            return await there.wait_for(outcome, wait_s) if wait_s else outcome

    with speaker.files() as files:
        outcome = asyncio.run(visit())
    service = outcome.service
    if service is not None and service.lifecycle is not Lifecycle.SERVING:
        message = f"{outcome.session[:8]} does not serve {outcome.model}: {service.note or 'it does not say why'}"
        raise FabrictoolError.of("FT6108", message, thing=f"session/{outcome.session}")
    state: Literal["told", "serving", "idle"] = "told" if not wait_s else "serving" if outcome.model else "idle"
    if as_json:
        json_data(
            Assignment(
                session=outcome.session,
                version=outcome.version,
                model=outcome.model,
                former=outcome.former,
                state=state,
            )
        )
        return
    what = {
        "told": f"is told to serve {outcome.model}" if outcome.model else "is told to serve nothing",
        "serving": f"serves {outcome.model}",
        "idle": "is idle",
    }[state]
    data(f"{outcome.session[:8]} {what} (assignment {outcome.version})")


# Wide: who says what to how many, and for how long.
def keep(speaker: Speaker, query: FleetQuery, words: ModelWords, count: int, *, once: bool) -> int:
    """Assign as soon as one of `count` is missing and somebody is idle; with `once` 1 when not enough were there.

    Raises
    ------
    FabrictoolError
        FT6007 when the controller was revoked, FT6107 as `ControllerVisit` does.
    """
    wanted = _wanted(speaker.source, words)
    gateways = gateways_of(speaker.source, speaker.gateways)

    async def visit() -> int:
        async with ControllerVisit(files, gateways, SystemClock()) as there:
            _warn(there)
            say(f"{words.model} shall be served by {count}" + ("" if once else "; Ctrl-C ends"))
            last_warning = ""
            while not there.ended:
                if there.ends_at < time.time():
                    message = "this controller's certificate has ended"
                    hint = "make another with `fabrictool trust controller PROVIDER`, and start again"
                    raise FabrictoolError.of("FT6005", message, hint=hint)
                refusal = there.refused(wanted, query) if there.assigned(words.model) < count else None
                if refusal is not None and str(refusal) != last_warning:
                    last_warning = str(refusal)
                    say(f"warning: nobody who is idle may be told: {last_warning}")
                try:
                    # Cut off, or without the news of others, it would act on what is over.
                    for member in there.missing(wanted, query, count) if there.mesh.up_to_date else ():
                        outcome = await there.say(member, wanted)
                        say(f"{outcome.session[:8]} is told to serve {outcome.model} (assignment {outcome.version})")
                except UnreachableError as error:  # it is on the way, and the gateways come back
                    if once:
                        raise
                    say(f"warning: {error}")
                if once:
                    return 0 if there.assigned(words.model) >= count else 1
                await asyncio.sleep(LOOK_S)
            raise FabrictoolError.of("FT6007", f"this controller is not heard any more: {there.ended}")

    with speaker.files() as files:
        return asyncio.run(visit())


def _chosen(there: ControllerVisit, session: str, query: FleetQuery, wanted: AssignmentBody) -> FleetMember:
    """The one that is named, else the best that is idle; raises FT6104, FT6106."""
    if session:
        return there.session(session)
    best = next(iter(there.missing(wanted, query, MAX_COUNT)), None)
    if best is None:
        hint = "`fabrictool mesh members --idle` lists those that wait for a model"
        raise InvalidInputError.of("FT6106", "no session is idle and has what is asked for", hint=hint)
    return best


def _warn(there: ControllerVisit) -> None:
    if warning := there.early_end:
        say(f"warning: {warning}")


def _nothing() -> AssignmentBody:
    return AssignmentBody(federation="", session=bytes(16), by=bytes(16), version=0)


def _wanted(source: Source, words: ModelWords) -> AssignmentBody:
    """From the blueprint's model of that name, where the command line does not say it all."""
    known = {} if words.source and words.engine else _of_blueprint(source, words.model)
    given = {name: value for name in _FIELDS if (value := getattr(words, name))}
    return AssignmentBody(
        federation="", session=bytes(16), by=bytes(16), version=0, model=words.model, tp=words.tp, **(known | given)
    )


_FIELDS = ("source", "engine", "precision", "context", "max_num_seqs")


def _of_blueprint(source: Source, name: str) -> dict[str, str | int]:
    from fabrictool.simulator.demanded import context_of

    model = source.blueprint.models.get(name)
    if model is None:
        hint = "give its --source and --engine, or name one of: " + ", ".join(sorted(source.blueprint.models))
        raise UsageError.of("FT9010", f"the blueprint has no model {name}", hint=hint)
    if model.options:
        say(f"note: options of {name} are left out, an assignment carries none: {', '.join(sorted(model.options))}")
    architecture = source.blueprint.architecture(model)
    model = next(iter(model.each_variant.values()))
    return {
        "source": model.source,
        "engine": model.engine,
        "precision": model.variant.precision,
        "context": 0 if architecture is None else context_of(model, architecture),
        "max_num_seqs": model.max_num_seqs or 0,
    }


def _only_provider(store: TrustStore) -> str:
    """Whose key is here."""
    names = sorted(path.stem for path in (store.folder / "providers").glob("*.key"))
    if len(names) != 1:
        what = f"the keys of {', '.join(names)} are here" if names else "no provider's key is here"
        raise UsageError.of("FT9001", f"who assigns? {what}", hint="give --provider NAME, or --identity FOLDER")
    return names[0]
