"""``validate``, ``schema`` and ``init``: files in, complaints or files out; no network."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from fabrictool.cli import completing
from fabrictool.cli.options import BlueprintOption, InventoryOption, JsonOption, OverlayOption, ScenarioOption

Format = Literal["text", "json", "github"]


def register(app: typer.Typer) -> None:
    for function in (validate, schema, init):
        app.command(function.__name__)(function)


def validate(
    blueprint: BlueprintOption = None,
    inventory: InventoryOption = None,
    overlay: OverlayOption = None,
    scenario: ScenarioOption = None,
    as_json: JsonOption = False,
    output: Annotated[Format, typer.Option("--format", help="text, json, or github annotations.")] = "text",
) -> int:
    """Check blueprint and inventory: schema, units, references; every problem at once, with its place."""
    from fabrictool.base.errors import InvalidInputError
    from fabrictool.blueprint.report import to_github
    from fabrictool.cli.answers import ProblemRow, Problems
    from fabrictool.cli.output import data, json_data, print_problems, say
    from fabrictool.cli.source import find_blueprint, load_with_traces

    chosen = "json" if as_json else output
    path = find_blueprint(blueprint)
    try:
        loaded = load_with_traces(path, inventory, overlay, scenario)
        problems, code = loaded.warnings, 0
    except InvalidInputError as error:
        problems, code = error.problems, error.exit_code
    if chosen == "json":
        json_data(Problems(valid=code == 0, problems=[ProblemRow.of(problem) for problem in problems]))
    elif chosen == "github":
        data(to_github(problems))
    else:
        print_problems(problems)
    if code == 0 and chosen == "text":
        models, clusters = len(loaded.blueprint.models), len(loaded.inventory.clusters)
        say(f"{path} is valid: {models} model{'s'[: models != 1]}, {clusters} cluster{'s'[: clusters != 1]}")
    elif chosen == "text":
        errors = sum(problem.severity == "error" for problem in problems)
        say(f"{errors} problem{'s'[: errors != 1]}; `fabrictool explain CODE` says more")
    return code


def schema(
    context: typer.Context,
    document: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KIND|COMMAND",
            help="blueprint (the default), inventory, part or policy; or a command that has --json, as in `schema plan`"
            " and `schema mesh members`.",
            autocompletion=completing.documents,
        ),
    ] = None,
    write_docs: Annotated[Path | None, typer.Option(help="Write all generated reference pages here instead.")] = None,
) -> None:
    """Print the JSON Schema of a file, for editors, or of what a command prints with --json."""
    from fabrictool.cli.output import data, say

    if write_docs is not None:
        from fabrictool.cli.reference_pages import write_pages

        for path in write_pages(context.find_root().command, write_docs):
            say(f"wrote {path}")
        return
    from fabrictool.cli.reference_pages import schema_text

    data(schema_text(" ".join(document or ["blueprint"])), end="")


def init(
    folder: Annotated[Path, typer.Argument(help="Where to write blueprint.yaml and inventory.yaml.")] = Path(),
    synthetic: Annotated[
        str, typer.Option(metavar="SIZE", help="A made-up fabric of MODELSxTYPESxGPUS, such as `50x8x5000`.")
    ] = "",
    seed: Annotated[int, typer.Option(help="Seed of the made-up fabric: the same seed gives the same files.")] = 0,
    load: Annotated[
        float, typer.Option(min=0.01, max=10, help="Its demand, as a share of what it could serve at best.")
    ] = 0.7,
) -> None:
    """Write a starter blueprint and inventory; never overwrites."""
    from fabrictool.base.errors import InvalidInputError
    from fabrictool.base.files import write_atomic
    from fabrictool.blueprint.starter import starter_files
    from fabrictool.cli.output import say

    texts = _synthetic(synthetic, seed, load) if synthetic else starter_files()
    files = {folder / name: text for name, text in texts.items()}
    taken = [path for path in files if path.exists()]
    if taken:
        raise InvalidInputError.of("FT9007", f"{taken[0]} exists", file=str(taken[0]), hint="choose another folder")
    for path, text in files.items():
        write_atomic(path, text.encode())
        say(f"wrote {path}")
    say(f"next: fabrictool validate -b {folder / 'blueprint.yaml'}")


def _synthetic(size: str, seed: int, load: float) -> dict[str, str]:
    import math

    import yaml

    from fabrictool.planner.instances.synthetic import documents, parse

    if math.isnan(load):
        raise typer.BadParameter("nan is not a share", param_hint="--load")
    texts = documents(parse(size), seed, load)
    line = f"# Made up by `fabrictool init --synthetic {size} --seed {seed} --load {load:g}`.\n"
    return {name: line + yaml.safe_dump(document, sort_keys=False) for name, document in texts.items()}
