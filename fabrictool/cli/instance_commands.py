"""``instance``: planning problems in the form of other systems, solved here."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from fabrictool.cli.options import JsonOption, seconds


class Kind(StrEnum):
    """Of the program that is solved."""

    exact = "exact"
    sliced = "sliced"


def register(app: typer.Typer) -> None:
    app.command("instance")(instance)


def instance(
    file: Annotated[
        Path, typer.Argument(help="A problem in Mélange's JSON: GPU prices, throughputs, histogram, rate.")
    ],
    solver: Annotated[
        Kind,
        typer.Option(help="exact: any share of a bucket on any GPU type; sliced: whole slices, as Mélange has it."),
    ] = Kind.exact,
    seed: Annotated[int, typer.Option(min=0, help="The solver's seed.")] = 0,
    budget: Annotated[
        float,
        typer.Option(
            parser=seconds(0.1, 86400), metavar="DURATION", show_default="60s", help="How long the solver may work."
        ),
    ] = 60.0,
    as_json: JsonOption = False,
) -> int:
    """Solve a published planning problem: which GPUs serve a workload at the lowest price."""
    from fabrictool.base.errors import InvalidInputError
    from fabrictool.base.files import file_error
    from fabrictool.cli.output import data, json_data, table
    from fabrictool.planner.instances.melange import read, solve

    try:
        text = file.read_text("utf-8-sig")
    except OSError as error:
        raise file_error(error, file) from error
    except UnicodeDecodeError as error:
        raise InvalidInputError.of("FT2020", f"not UTF-8 text: {error}", file=str(file)) from error
    problem = read(text, str(file))
    answer = solve(problem, solver.value, seconds=budget, seed=seed)
    gap = (answer.cost - answer.bound) / answer.cost if answer.cost else 0.0
    if as_json:
        from fabrictool.cli.forecast_answers import InstanceAnswer

        json_data(
            InstanceAnswer(
                solver=solver.value,
                gpus={gpu.name: count for gpu, count in zip(problem.gpus, answer.counts, strict=True)},
                cost_per_hour=answer.cost,
                bound=answer.bound,
                gap=gap,
                optimal=answer.optimal,
            )
        )
        return 0
    rows = [
        (gpu.name, str(count), f"{load:.2f}", f"{count * gpu.cost:.2f}")
        for gpu, count, load in zip(problem.gpus, answer.counts, answer.loads, strict=True)
    ]
    data(table(("GPU type", "count", "busy", "per hour"), rows))
    proof = "optimal" if answer.optimal else "not proved optimal"
    data(
        f"cost {answer.cost:.2f} per hour, at least {answer.bound:.2f} (gap {gap:.2%}, {proof}); solver {solver.value}"
    )
    return 0
