"""``catalogue add``, ``models``, ``devices``: what is known of hardware and models, and how a blueprint knows more."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fabrictool.cli.options import JsonOption

if TYPE_CHECKING:
    from fabrictool.cli.describing import ReadConfig


def register(app: typer.Typer) -> None:
    catalogue = typer.Typer(help="Models and devices that plans know, and models that are added.", no_args_is_help=True)
    for function in (add, models, devices):
        catalogue.command(function.__name__)(function)
    app.add_typer(catalogue, name="catalogue")


def add(
    config: Annotated[
        Path,
        typer.Argument(metavar="CONFIG", help="The model's config.json as Hugging Face has it; - for standard input."),
    ],
    model_id: Annotated[
        str,
        typer.Option("--id", metavar="ORGANISATION/NAME", help="The model's id; default: the file's `_name_or_path`."),
    ] = "",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write it there; default: to stdout.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a FILE that holds something else.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Describe a model that the catalogue does not have, from its config.json, as a file that a blueprint includes.

    Nothing is fetched. A model that the catalogue has needs none: then nothing is written.
    """
    from fabrictool.blueprint.described import part_text
    from fabrictool.cli.describing import read_config, refuse_another, sentence
    from fabrictool.cli.output import data, say

    read = read_config(config, model_id)
    refuse_another(read)
    text = part_text(read.entry, read.origin)
    if output is not None and read.known is None:
        _write(output, text, force=force)
    if as_json:
        _document(read, output)
    elif output is None and read.known is None:
        data(text, end="")
    say(sentence(read.entry))
    if read.others:
        say("its parts for images or sound are not counted: leave them some memory")
    if read.quantised:
        say(f"its weights are quantised ({read.quantised}): say how by the model's `variant: {{precision: …}}`")
    _next_step(read, output)


def _write(output: Path, text: str, *, force: bool) -> None:
    from fabrictool.base.errors import InvalidInputError
    from fabrictool.base.files import check_output, write_output
    from fabrictool.cli.output import say

    check_output(output)
    if output.is_file():
        if output.read_bytes() == text.encode():
            say(f"{output} is as it should be")
            return
        if not force:
            hint = "choose another file, or replace it with --force"
            raise InvalidInputError.of("FT9007", f"{output} exists, with another content", file=str(output), hint=hint)
    write_output(output, text.encode())
    say(f"wrote {output}")


def _next_step(read: ReadConfig, output: Path | None) -> None:
    from fabrictool.cli.output import say

    if read.known is not None:
        say(
            f"the catalogue has this model with these numbers: `source: hf://{read.entry.id}` is enough, nothing to add"
        )
        return
    file = "FILE" if output is None else str(output)
    saved = f"save it as {file} beside the blueprint, " if output is None else ""
    say(f"next: {saved}write `include: [{file}]` in the blueprint, and `source: hf://{read.entry.id}` in a model")


def _document(read: ReadConfig, output: Path | None) -> None:
    from fabrictool.blueprint.described import written_fields
    from fabrictool.cli.answers import Architecture
    from fabrictool.cli.describing import kv_octets
    from fabrictool.cli.output import json_data

    entry = read.entry
    json_data(
        Architecture(
            id=entry.id,
            known=read.known is not None,
            written=None if output is None or read.known is not None else str(output),
            parameters=entry.parameters,
            active_parameters=entry.active_parameters,
            kv_octets_per_token=kv_octets(entry),
            architecture=written_fields(entry),
        )
    )


def models(as_json: JsonOption = False) -> None:
    """List the models of the catalogue, by their ids on Hugging Face, and the other names of each."""
    from fabrictool.catalog import models as catalogued
    from fabrictool.cli.answers import CatalogueModel, CatalogueModels
    from fabrictool.cli.describing import kv_octets
    from fabrictool.cli.output import json_data, table
    from fabrictool.cli.paging import page

    if as_json:
        rows = [
            CatalogueModel(
                id=entry.id,
                aliases=entry.aliases,
                parameters=entry.parameters,
                active_parameters=entry.active_parameters,
                layers=entry.layers,
                kv_octets_per_token=kv_octets(entry),
                max_context=entry.max_context,
            )
            for entry in catalogued().values()
        ]
        json_data(CatalogueModels(models=rows))
        return
    shown = [
        [
            entry.id,
            *(f"{count / 1e9:.4g}" for count in (entry.parameters, entry.active_parameters)),
            str(entry.layers),
            f"{kv_octets(entry) / 1e3:.4g}",
            str(entry.max_context),
        ]
        for entry in catalogued().values()
    ]
    page(table(["MODEL", "BILLION", "ACTIVE", "LAYERS", "KV KB/TOK", "CONTEXT"], shown))


def devices(as_json: JsonOption = False) -> None:
    """List the devices of the catalogue, by the ids that inventories name them by."""
    from fabrictool.catalog import accelerators
    from fabrictool.cli.answers import CatalogueDevice, CatalogueDevices
    from fabrictool.cli.output import json_data, table
    from fabrictool.cli.paging import page

    if as_json:
        rows = [
            CatalogueDevice(
                id=entry.id,
                title=entry.title,
                memory=entry.memory,
                memory_bandwidth=entry.memory_bandwidth,
                flops=entry.flops,
                link=entry.link,
                tdp_w=entry.tdp_w,
            )
            for entry in accelerators().values()
        ]
        json_data(CatalogueDevices(devices=rows))
        return
    shown = [
        [
            entry.id,
            entry.title,
            f"{entry.memory / 1e9:.4g}",
            f"{entry.memory_bandwidth / 1e9:.4g}",
            f"{entry.flops['bf16'] / 1e12:.4g}" if "bf16" in entry.flops else "–",
            entry.link or "–",
            f"{entry.tdp_w:.4g}",
        ]
        for entry in accelerators().values()
    ]
    page(table(["DEVICE", "NAME", "GB", "GB/S", "BF16 TF/S", "LINK", "W"], shown))
