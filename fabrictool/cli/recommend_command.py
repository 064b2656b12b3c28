"""``recommend``: which engine, precision, cut and batch limit serve a model best."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fabrictool.cli import completing
from fabrictool.cli.options import JsonOption

if TYPE_CHECKING:
    from fabrictool.base.units import Share


def register(app: typer.Typer) -> None:
    app.command("recommend")(recommend)


def recommend(
    model: Annotated[
        str,
        typer.Argument(
            help="The model's id, or the path of its config.json or of a part that describes it.",
            autocompletion=completing.models,
        ),
    ],
    device: Annotated[
        list[str],
        typer.Option(help="Device by its id in the catalogue, or ID=PRICE of an hour of one; several are compared."),
    ],
    engine: Annotated[list[str] | None, typer.Option(help="Engine; several are compared. Default: vllm.")] = None,
    precision: Annotated[
        list[str] | None,
        typer.Option(help="Of the weights; several are compared. Default: as released; of 16-bit ones fp8, too."),
    ] = None,
    kv_precision: Annotated[str, typer.Option(help="Of the KV cache.")] = "bf16",
    devices: Annotated[int, typer.Option(min=1, max=1024, help="Most devices of one replica.")] = 8,
    input_len: Annotated[int, typer.Option("--input", min=1, help="Mean length of prompts, tokens.")] = 1024,
    output_len: Annotated[int, typer.Option("--output", min=1, help="Mean length of answers, tokens.")] = 256,
    slo: Annotated[
        str | None,
        typer.Option(help="Targets in a blueprint's words, such as `ttft_p95=800ms,tpot_p95=40ms`; default: none."),
    ] = None,
    confidence: Annotated[
        str, typer.Option(help="With which each target has to be kept; 50%: by the forecast as it is.")
    ] = "90%",
    calibrations: Annotated[
        Path | None, typer.Option(help="A folder of your own calibrations, preferred to the shipped ones.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Write all settings and their front to this .svg or .png.")] = None,
    as_json: JsonOption = False,
) -> int:
    """Compare all ways to run one replica of a model, and recommend the one with the most tokens within targets.

    Engines, precisions, tensor, pipeline, expert and data parallelism, and batch limits are simulated with a full
    batch. The table shows those that no other one beats in both speed for each user and tokens for each device.
    """
    from fabrictool.cli import recommending, simulation_output
    from fabrictool.cli.output import data, json_data, say

    if plot is not None:
        simulation_output.plottable(plot)
    question = recommending.question(
        model,
        device,
        engine or ["vllm"],
        precision or [],
        (input_len, output_len),
        devices=devices,
        slo=slo,
        confidence=_confidence(confidence),
        kv_precision=kv_precision,
    )
    answer = recommending.answer(question, calibrations)
    if as_json:
        json_data(recommending.document(answer))
    else:
        data(recommending.text(answer))
        for line in recommending.notes(answer):
            say(line)
    if plot is not None:
        recommending.write_plot(plot, answer)
        say(f"{plot} shows all settings")
    return 0 if answer.pick is not None else 3


def _confidence(text: str) -> Share:
    from fabrictool.base.errors import UsageError
    from fabrictool.base.units import Share, UnitError

    try:
        share = Share.parse(text)
    except UnitError as error:
        raise UsageError.of("FT9001", f"--confidence {text!r}: {error.message}", hint=error.hint) from error
    if not 0.5 <= share <= 0.99:
        raise UsageError.of("FT9001", f"--confidence is {text}", hint="from 50% to 99%")
    return share
