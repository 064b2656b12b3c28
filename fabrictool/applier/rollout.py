"""In which order actions are carried out, and what one failure holds back; pure.

Waves follow each other, the actions of a wave go on side by side:

1. what must end first, because its devices are needed;
2. gateways: agents would wait in vain for one to reach;
3. all new replicas;
4. replacements, one of every model in a wave: the first is the canary of its model, and a model is never more than one
   replica above its number (a surge of one);
5. what nobody asks for any more, then the gateway.

On batch systems a slot that is given up may not come back for days, so nothing that serves is stopped for a model whose
rollout failed.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from fabrictool.domain.specs import GatewaySpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fabrictool.domain.plan import Action


def model_of(address: str) -> str:
    """The model of ``replica/MODEL/N``; "" for a gateway."""
    kind, _, rest = address.partition("/")
    return rest.rpartition("/")[0] if kind == "replica" else ""


def waves(changes: Sequence[Action]) -> list[list[Action]]:
    """`changes` in the plan's order, cut into waves."""
    found: list[list[Action]] = []
    last = ""
    surges: dict[str, int] = defaultdict(int)
    replacements: list[list[Action]] = []
    for action in changes:
        gateway = isinstance(action.spec, GatewaySpec) or action.address.startswith("gateway/")
        if action.kind == "replace" and not gateway:
            turn = surges[model_of(action.address)]
            surges[model_of(action.address)] += 1
            if turn == len(replacements):
                replacements.append([])
            replacements[turn].append(action)
            continue
        if action.kind == "delete" and replacements:
            found, replacements, last = [*found, *replacements], [], ""
        sort = f"{'delete' if action.kind == 'delete' else 'start'} {gateway}"
        if sort != last:
            found.append([])
            last = sort
        found[-1].append(action)
    return [*found, *replacements]


def held_back(action: Action, failed: set[str]) -> bool:
    """Whether a failure of its model keeps an action from being carried out: what serves is then not touched."""
    return action.kind in ("replace", "delete") and model_of(action.address) in failed
