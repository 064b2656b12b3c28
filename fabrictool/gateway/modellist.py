"""``/v1/models``: what a client may ask for, and what the replicas of it are."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from fabrictool.gateway.openai import GatewayResponse, json_response, model_object, no_such_model

if TYPE_CHECKING:
    from fabrictool.gateway.directory import Directory
    from fabrictool.gateway.keys import Consumer
    from fabrictool.gateway.rules import RoutingRules
    from fabrictool.gateway.waking import Waking

_OF_A_VARIANT = ("provider", "site", "labels", "engine", "device", "precision", "context", "replicas")


def models_for(
    consumer: Consumer | None, directory: Directory, rules: RoutingRules, waking: Waking, created: int
) -> list[dict[str, Any]]:
    """The models that somebody serves who may serve this client, and those that are served when it asks for them;
    `created` is a wall second.
    """
    listed, group = [], consumer.group if consumer is not None else None
    for name in sorted({*directory.models(), *waking.rules}):
        base = directory.bases.get(name, name)
        if consumer is not None and not (consumer.may_use(name) or consumer.may_use(base)):
            continue
        targets = directory.entitled(name, rules.trust, group, None)
        if targets == "unknown-model" and name in waking.rules and rules.trust.sees(group, name):
            targets = ()
        if not isinstance(targets, tuple):
            continue
        variants = Counter(
            (t.provider, t.site, tuple(sorted(t.labels)), t.engine, t.device, t.precision, t.context) for t in targets
        )
        rows = [dict(zip(_OF_A_VARIANT, (*kind, number), strict=True)) for kind, number in sorted(variants.items())]
        aliases = sorted(alias for alias, means in rules.aliases.items() if means == name)
        parent = {"parent": base} if base != name else {}  # as vLLM says it
        listed.append(parent | model_object(name, aliases, sorted({t.provider for t in targets}), rows, created))
    return listed


def models_answer(models: list[dict[str, Any]]) -> GatewayResponse:
    return json_response({"object": "list", "data": models})


def model_in(path: str, rules: RoutingRules) -> str:
    """The model that ``/v1/models/NAME`` means; SDKs send %2F for a slash in its name."""
    name = unquote(path.removeprefix("/v1/models/"))
    return rules.aliases.get(name, name)


def model_answer(name: str, models: list[dict[str, Any]], *, may_come: bool) -> GatewayResponse:
    """Of `models` the one with this name, or why there is none."""
    for entry in models:
        if entry["id"] == name:
            return json_response(entry)
    return no_such_model(name, may_come=may_come)
