"""In which order actions are carried out, and what one failure holds back; pure.

Waves follow each other, the actions of a wave go on side by side:

1. what must end first, because its devices are needed;
2. new gateways: agents would wait in vain for one to reach;
3. all new replicas;
4. gateways that are replaced, one after the other: the next one goes only when the former is ready, so that clients
   that know two always reach one of them;
5. replacements of replicas, one of every model in a wave: the first is the canary of its model, and a model is never
   more than one replica above its number (a surge of one);
6. what nobody asks for any more, then gateways.

On batch systems a slot that is given up may not come back for days, so nothing that serves is stopped for a model whose
rollout failed.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from fabrictool.domain.address import Address
from fabrictool.planner.diff import is_gateway

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fabrictool.domain.plan import Action


def model_of(action: Action) -> str:
    """Whose replica it is about; "" for a gateway."""
    return Address.parse(action.address).model


def waves(changes: Sequence[Action]) -> list[list[Action]]:
    """`changes` in the plan's order, cut into waves."""
    cut: list[list[Action]] = []
    last = None
    surges: dict[str, int] = defaultdict(int)
    replacements: list[list[Action]] = []
    for action in changes:
        gateway = is_gateway(action)
        if action.kind == "replace" and gateway:
            cut, last = [*cut, [action]], None
            continue
        if action.kind == "replace":
            turn = surges[model_of(action)]
            surges[model_of(action)] += 1
            if turn == len(replacements):
                replacements.append([])
            replacements[turn].append(action)
            continue
        if action.kind == "delete" and replacements:
            cut, replacements, last = [*cut, *replacements], [], None
        if (action.kind == "delete", gateway) != last:
            cut.append([])
            last = (action.kind == "delete", gateway)
        cut[-1].append(action)
    return [*cut, *replacements]


def held_back(action: Action, failed: set[str]) -> bool:
    """Whether a failure of its model keeps an action from being carried out: what serves is then not touched."""
    return action.kind in ("replace", "delete") and model_of(action) in failed
