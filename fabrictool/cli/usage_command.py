"""``usage``: who used how much of what, from the gateways' request records."""

from __future__ import annotations

import csv
import io
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fabrictool.cli.options import BlueprintOption, InventoryOption, JsonOption
from fabrictool.cli.source import Source

if TYPE_CHECKING:
    from fabrictool.cli.fabric_answers import UsageAnswerRow
    from fabrictool.gateway.store import RecordStore
    from fabrictool.gateway.sums import UsageRow

_DAY_S = 86400.0
FIGURES = ("requests", "failed", "prompt_tokens", "cached_tokens", "completion_tokens", "uncounted", "e2e_s", "ttft_s")


def register(app: typer.Typer) -> None:
    app.command("usage")(usage)


def usage(
    store: Annotated[
        str,
        typer.Argument(
            help="SQLite file, or reference to a database's address (secret://…); default: the blueprint's."
        ),
    ] = "",
    by: Annotated[
        str, typer.Option(help="Comma-separated: hour, day, tenant, key, model, provider, gateway, fabric.")
    ] = "tenant,model",
    since: Annotated[
        str, typer.Option(help="First day or time (UTC), such as 2026-11-01, or how long ago: 7d.")
    ] = "30d",
    until: Annotated[str, typer.Option(help="Day or time before which it ends, or how long ago; default: now.")] = "",
    tenant: Annotated[str, typer.Option(help="Of this tenant alone.")] = "",
    model: Annotated[str, typer.Option(help="Of this model alone.")] = "",
    gateway: Annotated[str, typer.Option(help="Of the blueprint's gateway of this name.")] = "",
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV on stdout.")] = False,
    as_json: JsonOption = False,
    blueprint: BlueprintOption = None,
    inventory: InventoryOption = None,
) -> int:
    """Sum up the gateways' records: requests, tokens and times, by tenant, key, model, provider or hour."""
    from fabrictool.base.errors import UsageError
    from fabrictool.cli.output import data, json_data, say, table
    from fabrictool.cli.reading import moment
    from fabrictool.gateway.sums import GROUPINGS
    from fabrictool.gateway.sums import usage as summed

    words = [word.strip() for word in by.split(",") if word.strip()]
    if unknown := [word for word in words if word not in GROUPINGS]:
        raise UsageError.of("FT9001", f"--by {unknown[0]}: not known", hint=f"one of {', '.join(GROUPINGS)}")
    if as_csv and as_json:
        raise UsageError.of("FT9001", "--csv and --json exclude each other", hint="leave one of them out")
    now = time.time()
    begin, end = moment(since, now, "--since"), moment(until, now, "--until") if until else now
    equals = {"tenant": tenant, "model": model} | ({} if store else {"gateway": gateway})
    opened = _opened(store, gateway, Source(blueprint, inventory))
    try:
        rows = summed(opened, words, since=begin, until=end, equals={k: v for k, v in equals.items() if v})
    finally:
        opened.close()
    shown = [[_group(word, row.group[word]) for word in words] for row in rows]
    if as_json:
        from fabrictool.cli.fabric_answers import UsageAnswer

        listed = [_document(words, group, row) for group, row in zip(shown, rows, strict=True)]
        json_data(UsageAnswer(since=_iso(begin), until=_iso(end), by=words, rows=listed))
    elif as_csv:
        data(_csv(words, shown, rows), end="")
    elif not rows or not any(row.requests for row in rows):
        say("no requests are recorded in that time")
    else:
        heads = [
            *(word.upper() for word in words),
            "REQUESTS",
            "FAILED",
            "PROMPT",
            "CACHED",
            "COMPLETION",
            "E2E",
            "TTFT",
        ]
        lines = [[*(cell or "–" for cell in group), *_cells(row)] for group, row in zip(shown, rows, strict=True)]
        data(table(heads, lines))
        if uncounted := sum(row.uncounted for row in rows):
            say(f"{uncounted} answers broke off: their tokens are what passed, and an estimate of their prompts")
    return 0


def _opened(store: str, gateway: str, source: Source) -> RecordStore:
    """For reading. Raises FT8120 to FT8122, FT14xx for a reference, FT8123 where a file is not on this machine."""
    from fabrictool.cli.reading import open_store

    return open_store(store or _of_blueprint(gateway, source))


def _of_blueprint(gateway: str, source: Source) -> str:
    """Where the records of a gateway are, or those of all: a reference or a path."""
    from fabrictool.base.errors import InvalidInputError, UsageError
    from fabrictool.gateway.keeping import RECORDS_FILE, records_folder

    known = {name: there for name, there in source.blueprint.written_gateways.items() if there.listen is not None}
    if not known or (gateway and gateway not in known):
        message = f"the blueprint has no gateway {gateway} with clients" if gateway else "no gateway has clients"
        raise UsageError.of("FT9001", message, hint="name a store: fabrictool usage FILE")
    meant = [known[gateway]] if gateway else list(known.values())
    databases = {there.records.database for there in meant}
    if len(databases) > 1 or (databases == {None} and len(meant) > 1):
        raise UsageError.of("FT9001", "the gateways keep their records apart", hint=f"--gateway {next(iter(known))}")
    (database,) = databases
    if database is not None:
        return str(database)
    name, cluster = gateway or next(iter(known)), meant[0].cluster
    with source.fabric() as fabric:
        runs = fabric.folder.cluster(cluster)
    file = records_folder(runs, source.blueprint.fabric, name) / RECORDS_FILE
    if source.inventory.clusters[cluster].here:
        return str(file)
    where = f"RUNS.records/{source.blueprint.fabric}/{name}/{RECORDS_FILE}"
    message = f"the records of gateway {name} are on {cluster}, beside its run folders: {where}"
    raise InvalidInputError.of("FT8123", message, thing=name, hint="`fabrictool usage FILE` there, or with a copy here")


def _group(word: str, value: str | int) -> str:
    if word == "hour":
        return datetime.fromtimestamp(int(value) * 3600, UTC).strftime("%Y-%m-%dT%H:00Z")
    if word == "day":
        return datetime.fromtimestamp(int(value) * _DAY_S, UTC).strftime("%Y-%m-%d")
    return str(value)


def _iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _document(words: list[str], group: list[str], row: UsageRow) -> UsageAnswerRow:
    from fabrictool.cli.fabric_answers import UsageAnswerRow

    figures: dict[str, Any] = {name: getattr(row, name) for name in FIGURES}
    return UsageAnswerRow(**figures | dict(zip(words, group, strict=True)))


def _csv(words: list[str], shown: list[list[str]], rows: list[UsageRow]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*words, *FIGURES])
    for group, row in zip(shown, rows, strict=True):
        writer.writerow([*group, *(getattr(row, name) for name in FIGURES)])
    return text.getvalue()


def _cells(row: UsageRow) -> list[str]:
    tokens = (row.prompt_tokens, row.cached_tokens, row.completion_tokens)
    times = ("–" if value is None else f"{value:.2f} s" for value in (row.e2e_s, row.ttft_s))
    return [f"{row.requests:,}", f"{row.failed:,}", *(f"{count:,}" for count in tokens), *times]
