"""What ``trace profile`` prints."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from fabrictool.base.errors import UsageError
from fabrictool.base.units import Rate, Tokens
from fabrictool.cli.forecast_answers import ProfiledModel, WorkloadProfile
from fabrictool.cli.output import table
from fabrictool.cli.reading import as_given, is_store, open_store
from fabrictool.gateway.demand import demand_hours
from fabrictool.workload.arrivals import CVS
from fabrictool.workload.profile import HOUR_S, profiles

if TYPE_CHECKING:
    from pathlib import Path

    from fabrictool.workload.profile import LengthSketch, ModelProfile

QUANTILES = (0.5, 0.95, 0.99)


def profiles_of(source: Path, since: float, until: float, model: str | None) -> list[ModelProfile]:
    """Raises FT9001 for what is no store, FT812x for one that cannot be read."""
    if not is_store(source):
        raise UsageError.of("FT9001", f"{source} is no store of records", hint=f"fabrictool trace stats {source}")
    store = open_store(as_given(source))
    try:
        known = profiles(demand_hours(store, since=since, until=until))
    finally:
        store.close()
    return [profile for profile in known if model in (None, profile.model)]


def text(known: list[ModelProfile]) -> str:
    """Rates in requests/s, lengths in tokens."""
    heads = ("MODEL", "REQUESTS", "RATE", "BUSIEST HOUR", "CV", "INPUT p50/p95/max", "OUTPUT p50/p95/max", "REPEATED",
             "CACHED")  # fmt: skip
    rows = []
    for profile in known:
        its = profile.demand
        busiest = f"{profile.peak_rate:.3g}/s at {_hour(profile.peak_hour)}"
        shares = (f"{its.share(tokens):.0%}" for tokens in (its.shared_tokens, its.cached_tokens))
        rate = (f"{its.requests:,}", f"{its.rate:.3g}/s", busiest, f"{its.cv:.2g}")
        rows.append((profile.model, *rate, _lengths(its.input), _lengths(its.output), *shares))
    return table(heads, rows)


def document(known: list[ModelProfile]) -> WorkloadProfile:
    models = []
    for profile in known:
        its = profile.demand
        models.append(
            ProfiledModel(
                model=profile.model,
                requests=its.requests,
                hours=profile.hours,
                first=_iso(its.first),
                last=_iso(its.last),
                rate=its.rate,
                peak_rate=profile.peak_rate,
                peak_hour=_hour(profile.peak_hour),
                cv=its.cv,
                input=_figures(its.input),
                output=_figures(its.output),
                repeated_share=its.share(its.shared_tokens),
                cached_share=its.share(its.cached_tokens),
            )
        )
    return WorkloadProfile(models=models)


def blueprint_part(known: list[ModelProfile]) -> str:
    """The `demand` of each model, at its mean rate, to be put into a blueprint."""
    lines = ["models:"]
    for profile in known:
        its = profile.demand
        uneven = min(max(float(f"{its.cv:.2g}"), CVS[0]), CVS[1])
        lines += [
            f"  {profile.model}:",
            f"    # {its.requests:,} requests in {profile.hours} hours; {profile.peak_rate:.3g}/s in the busiest one",
            "    demand:",
            f"      rate: {Rate(float(f'{its.rate:.3g}'))}",
            f"      cv: {uneven:g}",
            f"      input: {_declared(its.input)}",
            f"      output: {_declared(its.output)}",
        ]
    return "\n".join(lines)


def _declared(length: LengthSketch) -> str:
    figures = (max(1, round(length.sums.mean)), round(length.sums.sd), length.most)
    return "{{mean: {}, sd: {}, max: {}}}".format(*map(Tokens, figures))


def _figures(length: LengthSketch) -> dict[str, float]:
    figures = {"mean": length.sums.mean, "sd": length.sums.sd, "max": float(length.most)}
    return figures | {f"p{share * 100:g}": length.quantile(share) for share in QUANTILES}


def _lengths(length: LengthSketch) -> str:
    return f"{length.quantile(0.5):,.0f}/{length.quantile(0.95):,.0f}/{length.most:,}"


def _hour(hour: int) -> str:
    return datetime.fromtimestamp(hour * HOUR_S, UTC).strftime("%Y-%m-%dT%H:00Z")


def _iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
