"""``simulate``, ``calibrate`` and ``trace``: what would happen, how sure that is, and what users really send."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fabrictool.cli.options import BlueprintOption, InventoryOption, JsonOption, OverlayOption
from fabrictool.cli.source import Source

if TYPE_CHECKING:
    from fabrictool.cli.simulating import ScenarioPlay
    from fabrictool.cli.sweeping import SeedSpread

SeedOption = Annotated[int, typer.Option(min=0, help="Seed: the same seed gives the same bytes.")]
SinceOption = Annotated[
    str, typer.Option(help="A store's records from this day or time (UTC) on, such as 2026-11-01, or 7d: so long ago.")
]
UntilOption = Annotated[str, typer.Option(help="A store's records before this day or time.")]
OutputOption = Annotated[Path | None, typer.Option("--output", "-o", help="Write there instead of to stdout.")]


def register(app: typer.Typer) -> None:
    app.command("simulate")(simulate)
    app.command("calibrate")(calibrate)
    traces = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Import, describe and make workload traces.")
    for name, function in (
        ("import", trace_import),
        ("stats", trace_stats),
        ("generate", trace_generate),
        ("export", trace_export),
        ("profile", trace_profile),
    ):
        traces.command(name)(function)
    app.add_typer(traces, name="trace")


def simulate(
    plan: Annotated[Path | None, typer.Argument(help="A saved plan; default: what `plan` would place.")] = None,
    blueprint: BlueprintOption = None,
    inventory: InventoryOption = None,
    overlay: OverlayOption = None,
    scenario: Annotated[list[str] | None, typer.Option(help="Scenario of the blueprint; several are compared.")] = None,
    status: Annotated[
        Path | None,
        typer.Option(help="Output of a running fabric's `status --json`, instead of a plan: what runs is simulated."),
    ] = None,
    trace: Annotated[
        list[Path] | None,
        typer.Option(
            help="A recorded workload instead of the declared demand: a trace, or a store of request records (a SQLite"
            " file, or secret://…, a reference to a database's address); several are compared."
        ),
    ] = None,
    workload: Annotated[
        str | None,
        typer.Option(help="A made-up workload, such as `poisson,rate=5,input=512,output=128` (trace generate --help)."),
    ] = None,
    model: Annotated[list[str] | None, typer.Option(help="Only these models of the blueprint.")] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=10_000_000,
            help="How many requests of each model; default: all of a trace, or 10,000 made-up ones.",
        ),
    ] = None,
    rate: Annotated[float | None, typer.Option(help="Play at this rate, req/s, instead of the declared one.")] = None,
    event: Annotated[
        list[str] | None,
        typer.Option(
            help="KIND:MODEL/INDEX@TIME since the start, such as `down:llama/0@60s`; KIND is up (a cold start ends),"
            " drain (no new requests) or down (gone, with what it runs)."
        ),
    ] = None,
    host_cache: Annotated[
        str | None,
        typer.Option(
            help="Memory of the host, such as 200GiB for each replica, that keeps prefixes which its cache drops."
        ),
    ] = None,
    seed: SeedOption = 0,
    seeds: Annotated[
        int | None,
        typer.Option(min=2, max=10_000, help="Play so many seeds, from --seed on, and show how far they differ."),
    ] = None,
    cases: Annotated[Path | None, typer.Option(help="A CSV of single configurations; one forecast per row.")] = None,
    executor: Annotated[
        str,
        typer.Option(
            help="Where cases, seeds, traces and scenarios are simulated: here, processes, dask://HOST:PORT; default:"
            " processes where there is much to do."
        ),
    ] = "",
    workers: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Processes for them; default: one per core.")
    ] = None,
    calibrations: Annotated[
        Path | None, typer.Option(help="A folder of your own calibrations, preferred to the shipped ones.")
    ] = None,
    output: OutputOption = None,
    plot: Annotated[Path | None, typer.Option(help="Write latency curves and timeline to this .svg or .png.")] = None,
    chrome_trace: Annotated[
        Path | None, typer.Option(help="Write requests as Chrome trace events (chrome://tracing, Perfetto).")
    ] = None,
    chart: Annotated[bool, typer.Option("--chart", help="Also draw the latency curves in the terminal.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Play a workload on a blueprint's placement and forecast latency, goodput, utilisation, cost and energy.

    With --cases it forecasts many single configurations instead, and takes --calibrations, --output, --executor and
    --workers only. Ctrl-C ends a play early with what has been simulated; of several seeds or traces nothing is shown.
    """
    from fabrictool.cli import simulating, simulation_output, sweeping
    from fabrictool.cli.calibration_files import read_calibrations
    from fabrictool.cli.output import data, json_data, say
    from fabrictool.cli.plan_text import folded
    from fabrictool.simulator.play import PlayOptions

    if cases is not None:
        _alone({
            "PLAN": plan, "--blueprint": blueprint, "--inventory": inventory, "--overlay": overlay,
            "--scenario": scenario or None, "--status": status, "--trace": trace or None, "--workload": workload,
            "--model": model or None, "--requests": requests, "--rate": rate, "--event": event or None,
            "--host-cache": host_cache,
            "--plot": plot, "--chrome-trace": chrome_trace, "--chart": chart or None, "--json": as_json or None,
            "--seeds": seeds,
        })  # fmt: skip
        return simulating.answer_cases(cases, output, calibrations, executor, workers)
    _refuse("give either --trace or --workload", trace or None, workload)
    _refuse("give either a plan or --status", plan, status)
    if plot is not None:
        simulation_output.plottable(plot)
    options = PlayOptions(
        models=tuple(model or ()),
        requests=requests,
        rate=rate,
        seed=seed,
        calibrations=read_calibrations(calibrations),
        events=tuple(simulating.event(text) for text in event or ()),
        host_cache=0.0 if host_cache is None else simulating.host_cache(host_cache),
    )
    traces = trace or []
    scenarios: list[str | None] = [*scenario] if scenario else [None]
    sources = [Source(blueprint, inventory, overlay, name) for name in scenarios]
    inputs = simulating.PlayInputs(plan, status, traces[0] if traces else None, workload)
    runs: list[ScenarioPlay] = []
    spreads: list[SeedSpread] = []
    placed = bool(executor or workers) or None
    if seeds is not None or len(traces) > 1 or (placed and len(sources) > 1):
        drawn = plot or chrome_trace or chart or None
        _refuse("--plot, --chrome-trace and --chart draw one play, not several seeds or traces", drawn)
        swept = sweeping.PlaySweep(traces, seeds, executor, workers)
        shown = sweeping.play_all(sources, inputs, options, swept)
        spreads = [] if seeds is None else sweeping.spreads_of(shown)
    else:
        _refuse("--executor and --workers are for --cases, --seeds, several --trace or several --scenario", placed)
        runs = simulating.play_scenarios(sources, inputs, options)
        shown = [run.shown for run in runs]
    document = simulation_output.document(shown, seed, spreads)
    if output is not None:
        simulation_output.write_json(output, document)
    if as_json:
        json_data(document)
    else:
        table, notes = simulation_output.lines_of(shown, spreads)
        data(table)
        for line in notes:
            say("\n".join(folded(line)))
    if chart:
        say(simulation_output.terminal_chart(runs))
    if plot is not None:
        simulation_output.write_plot(plot, runs)
        say(f"{plot} shows the latency curves and the timeline")
    if chrome_trace is not None:
        simulation_output.write_chrome_trace(chrome_trace, runs)
        say(f"{chrome_trace} opens in chrome://tracing or ui.perfetto.dev")
    return 0 if all(run.report.complete for run in shown) else 130


def _alone(others: dict[str, object]) -> None:
    """Raises UsageError FT9001 when --cases comes with an option that it would ignore."""
    for option, value in others.items():
        _refuse(f"--cases does not take {option}", value)


def _refuse(why: str, *given: object) -> None:
    """Raises UsageError FT9001 when all of these options are given."""
    from fabrictool.base.errors import UsageError

    if None not in given:
        raise UsageError.of("FT9001", why)


def calibrate(
    measurements: Annotated[
        Path,
        typer.Argument(
            help="CSV: the columns of `simulate --cases` plus ttft_ms, tpot_ms and/or e2e_ms; or, with --device,"
            " records of single requests: JSON lines with t, in, out, ttft, latency, or the gateways' own store."
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the calibration files.")] = Path(
        "calibrations"
    ),
    device: Annotated[str | None, typer.Option(help="Records: what they were measured on, such as h100-sxm.")] = None,
    engine: Annotated[str | None, typer.Option(help="Records: the engine, such as vllm.")] = None,
    model: Annotated[str | None, typer.Option(help="Records: the model's Hugging Face id.")] = None,
    tp: Annotated[int, typer.Option(min=1, help="Records: devices of the replica.")] = 1,
    precision: Annotated[str, typer.Option(help="Records: precision of the weights.")] = "bf16",
    max_num_seqs: Annotated[
        int | None,
        typer.Option(min=1, max=4096, help="Records: most requests in a step; default: the engine's."),
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(min=1, max=131_072, help="Records: most tokens in a step; default: the engine's."),
    ] = None,
    replica: Annotated[str, typer.Option(help="A store's records: those that this replica answered.")] = "",
    since: SinceOption = "",
    until: UntilOption = "",
    as_json: JsonOption = False,
) -> int:
    """Fit efficiencies and overheads to your own measurements, or to what a running replica's requests took."""
    from fabrictool.base.errors import UsageError
    from fabrictool.cli import calibrating

    records = calibrating.configured(device, engine, model, tp, precision)
    if records:
        return calibrating.calibrate_records(
            measurements,
            output,
            records,
            max_num_seqs=max_num_seqs,
            token_budget=max_num_batched_tokens,
            replica=replica,
            since=since,
            until=until,
            as_json=as_json,
        )
    for name, given in (("--replica", replica), ("--since", since), ("--until", until)):
        if given:
            raise UsageError.of("FT9001", f"{name} is for records", hint="give --device, --engine and --model, too")
    return calibrating.calibrate(measurements, output, as_json=as_json)


def trace_import(
    source: Annotated[
        Path, typer.Argument(help="A public trace (CSV, JSON or JSON lines, also .gz), or a ServeGen folder.")
    ],
    output: OutputOption = None,
    seed: SeedOption = 0,
    hours: Annotated[str | None, typer.Option(help="FROM:TO, hours of a folder's recording, such as 10:12.")] = None,
    rate: Annotated[float | None, typer.Option(help="Mean requests/s that a folder's clients send together.")] = None,
) -> None:
    """Turn a public trace (Azure, BurstGPT, Mooncake, Swiss AI, ShareGPT) into our lines; broken rows are counted.

    From a folder of ServeGen's clients (chunk-N-trace.csv, chunk-N-dataset.json), requests are drawn client by client.
    """
    from fabrictool.base.errors import UsageError
    from fabrictool.cli import tracing
    from fabrictool.cli.output import say
    from fabrictool.cli.reading import read_requests

    if source.is_dir():
        requests = tracing.drawn(source, seed, hours, rate)
    elif hours is not None or rate is not None:
        raise UsageError.of("FT9001", "--hours and --rate are for folders of clients", hint="fabrictool trace export")
    else:
        requests = read_requests(source)
    tracing.write(requests, output)
    dropped = ", ".join(f"{count} {why}" for why, count in sorted(requests.dropped.items())) or "none"
    say(f"{len(requests)} requests over {requests.span:.0f} s; dropped: {dropped}")


def trace_stats(
    source: Annotated[Path, typer.Argument(help="A trace in any known format, or a store of request records.")],
    since: SinceOption = "",
    until: UntilOption = "",
    as_json: JsonOption = False,
) -> None:
    """Describe a trace: rates, bursts, lengths, popularity, prefix reuse, latencies."""
    from dataclasses import asdict

    from fabrictool.cli import tracing
    from fabrictool.cli.forecast_answers import TraceStatistics
    from fabrictool.cli.output import data, json_data
    from fabrictool.cli.reading import read_requests
    from fabrictool.workload.statistics import statistics

    described = statistics(read_requests(source, since=since, until=until))
    if as_json:
        json_data(TraceStatistics(**tracing.plain(asdict(described))))
    else:
        data(tracing.text(described))


def trace_profile(
    store: Annotated[
        Path, typer.Argument(help="Store of request records: a SQLite file, or secret://…, a database's address.")
    ],
    since: SinceOption = "30d",
    until: UntilOption = "",
    model: Annotated[str | None, typer.Option(help="Of this model alone.")] = None,
    as_yaml: Annotated[bool, typer.Option("--yaml", help="Print what a blueprint's models would declare.")] = False,
    as_json: JsonOption = False,
) -> None:
    """What users ask of each model: rate, bursts, lengths, and what prompts have in common; forgotten records count."""
    from fabrictool.base.errors import InvalidInputError, UsageError
    from fabrictool.cli import profiling, reading
    from fabrictool.cli.output import data, json_data

    if as_yaml and as_json:
        raise UsageError.of("FT9001", "--yaml and --json exclude each other", hint="leave one of them out")
    profiles = profiling.profiles_of(store, *reading.window(since, until), model)
    if not profiles:
        message = f"no request of {reading.as_given(store)} was answered since {since}"
        raise InvalidInputError.of("FT2201", message, hint="name an earlier --since, such as 365d")
    if as_json:
        json_data(profiling.document(profiles))
    else:
        data(profiling.blueprint_part(profiles) if as_yaml else profiling.text(profiles))


def trace_generate(
    workload: Annotated[
        str,
        typer.Argument(
            help="PROCESS,rate=R[,cv=C][,on=S,off=S][,input=L][,output=L][,models=N[,skew=S]]; a length L is tokens"
            " or SHAPE:MEAN:SD[:MIN:MAX]; PROCESS is poisson, gamma, weibull, constant or bursts; without"
            " a skew, models are as popular as Azure's functions."
        ),
    ],
    requests: Annotated[int, typer.Option(min=1, help="How many requests.")] = 1000,
    seed: SeedOption = 0,
    output: OutputOption = None,
) -> None:
    """Make a workload up: `fabrictool trace generate gamma,rate=4,cv=3,input=lognormal:900:700,output=200`."""
    from fabrictool.cli import tracing

    tracing.write(tracing.generated(workload, requests, seed), output)


def trace_export(
    source: Annotated[Path, typer.Argument(help="A trace in any known format, or a store of request records.")],
    output: OutputOption = None,
    model: Annotated[str | None, typer.Option(help="Only the requests for this model.")] = None,
    start: Annotated[float, typer.Option(min=0, help="Seconds from the first arrival.")] = 0.0,
    end: Annotated[float | None, typer.Option(help="Seconds from the first arrival; default: to the end.")] = None,
    since: SinceOption = "",
    until: UntilOption = "",
    anonymous: Annotated[
        bool, typer.Option("--anonymous", help="Models get numbers, and times are those since the first arrival.")
    ] = False,
) -> None:
    """Cut a piece out of a trace or of request records, in our own lines: never who asked, nor what."""
    from fabrictool.base.errors import InvalidInputError
    from fabrictool.cli import tracing
    from fabrictool.cli.output import say
    from fabrictool.cli.reading import read_requests

    requests = read_requests(source, since=since, until=until, model=model or "")
    if dropped := ", ".join(f"{count} {why}" for why, count in sorted(requests.dropped.items())):
        say(f"dropped: {dropped}")
    if model is not None:
        requests = requests.of_model(model)
    requests = requests.only(
        (requests.arrival >= start) & (requests.arrival <= (end if end is not None else float("inf")))
    )
    if not len(requests):
        raise InvalidInputError.of("FT2201", f"no requests of {source} are left")
    tracing.write(requests.anonymous() if anonymous else requests, output)
