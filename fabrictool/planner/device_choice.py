"""Who gets which devices of one partition's nodes, when some replicas are wanted on different ones."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from fabrictool.planner.packing import Block, packed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from fabrictool.domain.blueprint import Model
    from fabrictool.domain.specs import AgentSpec


@dataclass(frozen=True, slots=True)
class WantedNodes:
    """On how many nodes the replicas of models are wanted."""

    wished: Mapping[str, int] = field(default_factory=dict)
    """Model → nodes; nothing that runs moves for it, nor ends before something else starts."""
    needed: Mapping[str, int] = field(default_factory=dict)
    """Model → nodes, by a rule of the blueprint."""

    def of(self, model: str) -> int:
        """Nodes from which on it does not matter where further replicas are."""
        return max(1, self.wished.get(model, 1), self.needed.get(model, 1))

    def beside(self, elsewhere: Mapping[str, int]) -> WantedNodes:
        """Of one partition, when there are so many nodes with a replica by model in others."""
        return replace(self, needed={model: most - elsewhere.get(model, 0) for model, most in self.needed.items()})

    @classmethod
    def by(cls, models: Mapping[str, Model]) -> WantedNodes:
        """A minimum of several replicas is wished for because one may be lost: then not all of them with one node."""
        several = {name: model.replicas.min for name, model in models.items() if model.replicas.min > 1}
        spread = {name: least for name, least in several.items() if models[name].place.spread == "node"}
        return cls(dict.fromkeys(several, 2), spread)


NO_NODES = WantedNodes()


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """The devices of one partition, to be given away."""

    specs: Sequence[AgentSpec]
    running: Mapping[str, AgentSpec]
    held: set[int]
    nodes: list[list[int]]
    wanted: WantedNodes
    _node_of: dict[int, int] = field(init=False, repr=False, compare=False)
    """Device → its node."""
    _answering: dict[str, list[str]] = field(init=False, repr=False, compare=False)
    """Model → its replicas that answer."""

    def __post_init__(self) -> None:
        node_of = {index: at for at, node in enumerate(self.nodes) for index in node}
        answering: dict[str, list[str]] = {}
        for spec in self.specs:
            if spec.phase != "prefill":
                answering.setdefault(spec.model, []).append(spec.replica)
        object.__setattr__(self, "_node_of", node_of)  # both are asked for with each replica
        object.__setattr__(self, "_answering", answering)

    def devices(self, kept: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Of each replica; of none where that does not fit. What is `kept` stays, unless something else has no room
        then, or a rule wants more nodes.
        """
        staying = dict(kept)
        chosen = self._chosen(staying)
        if chosen is None:  # what stays is scattered so that something does not fit beside it
            staying = {}
            chosen = self._chosen(staying)
        hopeless = set[str]()
        while chosen is not None and self._lacking(chosen):
            spare = next((name for name in self._beside_others(staying, chosen) if name not in hopeless), None)
            if spare is None:
                break
            fewer = {name: its for name, its in staying.items() if name != spare}
            better = self._better(chosen, self._chosen(fewer))
            if better is chosen:  # it would leave its place for nothing
                hopeless.add(spare)
            else:
                staying, chosen = fewer, better
        if not self.held and (chosen is None or self._wishing(chosen)):  # nothing runs that would have to move
            chosen = self._better(chosen, self._packed({**self.wanted.wished, **self.wanted.needed}, {}))
        for stays in (kept, {}):
            if chosen is None or self._lacking(chosen):
                chosen = self._better(chosen, self._packed(self.wanted.needed, stays))
        return chosen or {}

    def _better(
        self, known: dict[str, tuple[int, ...]] | None, other: dict[str, tuple[int, ...]] | None
    ) -> dict[str, tuple[int, ...]] | None:
        if known is None or other is None:
            return other if known is None else known
        lacks = [(sum(self._lacking(its).values()), self._wishing(its)) for its in (known, other)]
        return other if lacks[1] < lacks[0] else known

    def _wishing(self, chosen: Mapping[str, tuple[int, ...]]) -> int:
        """Models that have fewer nodes than is wished for, and could have more."""
        number = Counter(spec.model for spec in self.specs)
        return sum(
            len(self.used(model, chosen)) < min(self.wanted.wished.get(model, 1), its, len(self.nodes))
            for model, its in number.items()
        )

    def _beside_others(
        self, staying: Mapping[str, tuple[int, ...]], chosen: Mapping[str, tuple[int, ...]]
    ) -> Iterator[str]:
        """Of models for which a rule wants more nodes: replicas that stay on a node with others of their model."""
        lacking = self._lacking(chosen)
        for spec in sorted(self.specs, key=lambda spec: spec.replica, reverse=True):
            if spec.model in lacking and spec.replica in staying:
                others = {name: its for name, its in staying.items() if name != spec.replica}
                if self._nodes_of([staying[spec.replica]]) <= self.used(spec.model, others):
                    yield spec.replica

    def _nodes_of(self, devices: Iterable[Iterable[int]]) -> set[int]:
        every = (index for indices in devices for index in indices)
        return {self._node_of[index] for index in every if index in self._node_of}

    def used(self, model: str, chosen: Mapping[str, tuple[int, ...]]) -> set[int]:
        """Nodes on which a model has a replica that answers."""
        return self._nodes_of(chosen.get(replica, ()) for replica in self._answering.get(model, ()))

    def _lacking(self, chosen: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
        """Model → nodes that rules want beyond those on which there is a replica."""
        lacking = {
            model: self.wanted.needed[model] - len(self.used(model, chosen))
            for model in sorted({spec.model for spec in self.specs} & self.wanted.needed.keys())
        }
        return {model: nodes for model, nodes in lacking.items() if nodes > 0}

    def _chosen(self, kept: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]] | None:
        """With the nodes that are wanted, else without; None when something does not fit."""
        chosen = self._largest_first(kept, self.wanted)
        return self._largest_first(kept, NO_NODES) if chosen is None else chosen

    def _largest_first(
        self, kept: Mapping[str, tuple[int, ...]], wanted: WantedNodes
    ) -> dict[str, tuple[int, ...]] | None:
        """Each stage into the fullest node that has room, first of those without one of its model where more nodes are
        wanted for it; None when something does not fit. Of the same size those come first that want nodes: others take
        what is left.
        """
        chosen = dict(kept)
        taken = {index for indices in kept.values() for index in indices}
        number = Counter[str]()
        order = []
        for spec in sorted(self.specs, key=lambda spec: (-spec.tp * spec.dp, spec.replica)):
            number[spec.model] += 1
            wants = 1 < wanted.of(spec.model) >= number[spec.model]
            order.append((-spec.tp * spec.dp, not wants, spec.replica, spec))
        for *_, spec in sorted(order, key=lambda its: its[:3]):
            if spec.replica in chosen:
                continue
            now = self.running.get(spec.replica)
            here = now is not None and (now.cluster, now.partition) == (spec.cluster, spec.partition)
            own = set(now.device_indices) if now is not None and here else set()
            used = self.used(spec.model, chosen)
            beside = {i for at in used for i in self.nodes[at]} if len(used) < wanted.of(spec.model) else set[int]()
            blocked = (taken | self.held, taken | (self.held - own), taken)
            # A rule comes before what must end first, a wish after it.
            needed = len(used) < wanted.needed.get(spec.model, 0)
            apart = [its | beside for its in blocked] if needed else []
            wished = [its for plain in blocked for its in ((plain | beside, plain) if beside else (plain,))]
            for those in (*apart, *wished):
                indices = _blocks(spec.pp, spec.tp * spec.dp, self.nodes, those)
                if indices:
                    break
            else:
                return None
            chosen[spec.replica] = indices
            taken |= set(indices)
        return chosen

    def fits(self, wanted: Mapping[str, int]) -> bool:
        """Whether all have room with models on so many nodes, if whatever runs may move."""
        return self._packed(wanted, {}) is not None

    def _packed(
        self, wanted: Mapping[str, int], kept: Mapping[str, tuple[int, ...]]
    ) -> dict[str, tuple[int, ...]] | None:
        """Each model on so many nodes, with what is `kept` where it is as far as that goes; None where no way was
        seen.
        """
        left = dict(wanted)
        blocks: list[Block] = []
        whose: list[AgentSpec] = []
        own: list[tuple[int, ...]] = []
        """By block: its devices now, where they are of one node."""
        for spec in sorted(self.specs, key=lambda spec: (-spec.tp * spec.dp, spec.replica)):
            size = spec.devices // spec.on_nodes
            now = kept.get(spec.replica, ())
            for first in range(0, size * spec.on_nodes, size):
                apart = left.get(spec.model, 0) > 0 and spec.phase != "prefill"
                left[spec.model] = left.get(spec.model, 0) - apart
                its = now[first : first + size]
                standing = self._nodes_of([its]) if its else set[int]()
                blocks.append(Block(spec.model, size, apart, next(iter(standing)) if len(standing) == 1 else None))
                whose.append(spec)
                own.append(its)
        nodes = packed(blocks, len(self.nodes), len(self.nodes[0]))
        if nodes is None:
            return None
        there = [its if at == block.stands_on else () for block, its, at in zip(blocks, own, nodes, strict=True)]
        taken = {index for its in there for index in its}
        chosen: dict[str, tuple[int, ...]] = {}
        for block, spec, at, its in zip(blocks, whose, nodes, there, strict=True):
            indices = its or _block(block.size, [self.nodes[at]], taken)
            chosen[spec.replica] = (*chosen.get(spec.replica, ()), *indices)
            taken |= set(indices)
        return chosen


def _blocks(stages: int, size: int, nodes: list[list[int]], blocked: set[int]) -> tuple[int, ...]:
    """Devices for all stages, or none."""
    indices: tuple[int, ...] = ()
    for _ in range(stages):
        block = _block(size, nodes, blocked | set(indices))
        if not block:
            return ()
        indices += block
    return indices


def _block(size: int, nodes: list[list[int]], blocked: set[int]) -> tuple[int, ...]:
    """The lowest aligned run of free devices, else the lowest free ones, in the fullest node that has enough."""
    free = sorted((len(node), node) for node in ([i for i in node if i not in blocked] for node in nodes))
    for room, node in free:
        if room >= size:
            starts = [i for i in node if i % size == 0 and all(i + step in node for step in range(size))]
            return tuple(range(starts[0], starts[0] + size)) if starts else tuple(node[:size])
    return ()
