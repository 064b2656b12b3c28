"""``state show``, ``history``, ``rebuild`` and ``unlock``."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from fabrictool.cli.options import BlueprintOption, InventoryOption, JsonOption, YesOption
from fabrictool.cli.source import Source

if TYPE_CHECKING:
    from fabrictool.domain.state import State


def register(app: typer.Typer) -> None:
    state = typer.Typer(help="What this side remembers of the fabric, and who writes it.", no_args_is_help=True)
    for function in (show, history, rebuild, unlock):
        state.command(function.__name__)(function)
    app.add_typer(state, name="state")


def show(blueprint: BlueprintOption = None, inventory: InventoryOption = None, as_json: JsonOption = False) -> None:
    """Say where the state is, what it holds and who has the lease."""
    from fabrictool.base.clock import duration_text
    from fabrictool.base.errors import FabrictoolError
    from fabrictool.cli.output import data, json_data

    folder = Source(blueprint, inventory).fabric().folder
    state = folder.read_state()
    try:
        lease, trouble = folder.store.holder(), ""
    except FabrictoolError as error:  # a reader may have no right to ask for it
        lease, trouble = None, str(error)
    if as_json:
        from fabrictool.cli.fabric_answers import StateAnswer

        json_data(StateAnswer(place=folder.store.place, lease=lease, state=state))
        return
    data(f"State of fabric {folder.path.name}: serial {state.serial}, lineage {state.lineage or 'none yet'}")
    data(f"in {folder.store.place}")
    data(f"last plan carried out: {state.applied_plan[:8] or 'none'}")
    if trouble:
        data(f"lease: unknown ({trouble})")
    elif lease is None:
        data("lease: none")
    else:
        data(f"lease: {lease}, since {duration_text(max(0.0, time.time() - lease.at))}")
    _print_units(state)


def history(blueprint: BlueprintOption = None, inventory: InventoryOption = None, as_json: JsonOption = False) -> None:
    """List former states: the last 20 of this machine, or the commits of a Git branch."""
    from fabrictool.cli.fabric_answers import StateHistory, StateVersion
    from fabrictool.cli.output import data, json_data, say, table

    store = Source(blueprint, inventory).fabric().folder.store
    versions = [
        StateVersion(
            serial=version.state.serial,
            at=version.at,
            lineage=version.state.lineage,
            applied_plan=version.state.applied_plan,
            units=len(version.state.units),
        )
        for version in store.history()
    ]
    if as_json:
        json_data(StateHistory(place=store.place, versions=versions))
        return
    if not versions:
        say(f"{store.place} lists no former states; an HTTP server may show them itself")
        return
    rows = [
        [str(version.serial), _clock(version.at), version.applied_plan[:8] or "-", str(version.units)]
        for version in versions
    ]
    data(table(["SERIAL", "WRITTEN", "PLAN", "UNITS"], rows))


def rebuild(
    blueprint: BlueprintOption = None,
    inventory: InventoryOption = None,
    yes: YesOption = False,
    lineage: Annotated[
        str, typer.Option(help="Lineage of the units, where neither they nor the trust root say it.")
    ] = "",
    partial: Annotated[
        bool, typer.Option(help="Leave out clusters that do not answer; right only when nothing runs there.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Make a lost or damaged state anew from what the clusters say; a damaged one is kept aside."""
    from fabrictool.cli.fabric_answers import StateRebuilt
    from fabrictool.cli.output import data, json_data, say
    from fabrictool.state.rebuild import rebuild as scan
    from fabrictool.state.rebuild import write_rebuilt

    with Source(blueprint, inventory).fabric() as fabric:
        rebuilt = scan(fabric, lineage=lineage, partial=partial)
        state = rebuilt.state
        if not as_json:
            data(f"Found {len(state.units)} units of lineage {state.lineage or 'none yet'}, for serial {state.serial}")
            _print_units(state)
        for note in rebuilt.notes:
            say(f"! {note}")
        ask(f"Write this as the state of fabric {fabric.name}, in {fabric.folder.store.place}?", yes=yes)
        aside = write_rebuilt(fabric, rebuilt, lineage=lineage, partial=partial, now=time.time())
    if aside is not None:
        say(f"the damaged state is kept in {aside}")
    if as_json:
        kept = None if aside is None else str(aside)
        json_data(StateRebuilt(aside=kept, notes=list(rebuilt.notes), state=state))
    say(f"wrote serial {state.serial}; next: fabrictool plan")


def _print_units(state: State) -> None:
    from fabrictool.cli.output import data, table

    rows = [[address, unit.cluster, unit.partition, unit.operation] for address, unit in sorted(state.units.items())]
    if rows:
        data("\n" + table(["UNIT", "CLUSTER", "PARTITION", "OPERATION"], rows))


def unlock(
    lease: Annotated[str, typer.Argument(help="Id of the lease, as the refused command and `state show` print it.")],
    blueprint: BlueprintOption = None,
    inventory: InventoryOption = None,
    yes: YesOption = False,
) -> None:
    """Take a lease away whose holder is gone for good; one that lives notices before its next write."""
    from fabrictool.base.clock import duration_text
    from fabrictool.cli.output import say

    store = Source(blueprint, inventory).fabric().folder.store
    holder = store.holder()
    if holder is not None and holder.id == lease:
        say(f"{holder}, since {duration_text(max(0.0, time.time() - holder.at))}")
        ask("Remove this lease? If its holder is still alive, it stops at its next write, possibly halfway.", yes=yes)
    store.unlock(lease)
    say(f"lease {lease} removed")


def ask(question: str, *, yes: bool) -> None:
    import sys

    from fabrictool.base.errors import UsageError
    from fabrictool.cli.output import say

    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageError.of("FT4007", "no terminal to confirm on; use --yes", hint="check what it would do first")
    say(f"{question} Only 'yes' is accepted:")
    if input().strip() != "yes":
        raise UsageError.of("FT4007", "not confirmed; nothing was changed")


def _clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(at))
