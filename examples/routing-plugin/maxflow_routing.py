"""Requests dealt out as the largest flow runs (Helix, Mei et al., ASPLOS 2025): gateway, site, replica.

A replica takes as much as its planner's weight says, and a site no more than its link lets through. The largest flow
from the gateway through the sites is what can be served; each replica's turns are its share of that flow, dealt out
smoothly as Helix's interleaved weighted round robin does. A replica whose queue is long is left out until it is
shorter, which is Helix's mask on the use of the cache.
"""

from collections import deque

QUEUE = 8
"""Requests in an engine's queue, from which on it gets no more while another has fewer."""
LINKS = {"far-site": 1.0}
"""Site → weight that its link lets through; a site that is not named lets all through."""


class MaxFlowPolicy:
    """See above."""

    name = "max-flow"
    learns = False

    def __init__(self, means, links=None):
        """`means`: the random source and latency targets, which this policy does not need."""
        self._links = LINKS if links is None else links
        self._shares = {}
        self._credit = {}

    def pick(self, candidates, request, now):
        free = [c for c in candidates if c.waiting < QUEUE] or candidates
        shares = self._shares_of(tuple(free))
        for candidate in free:
            self._credit[candidate] = self._credit.get(candidate, 0.0) + shares[candidate]
        chosen = max(free, key=lambda candidate: self._credit[candidate])
        self._credit[chosen] -= sum(shares.values())
        if len(self._credit) > 1000:
            self._credit.clear()
        return chosen

    def on_request_start(self, candidate, request, now):
        """Shares do not change with what is open."""

    def on_request_end(self, candidate, request, outcome):
        """Nor with how it went."""

    def _shares_of(self, candidates):
        key = tuple((candidate, candidate.weight) for candidate in candidates)
        if key not in self._shares:
            if len(self._shares) > 100:
                self._shares.clear()
            capacity = {}
            for candidate in candidates:
                site = f"site {candidate.site}"
                capacity["gateway", site] = self._links.get(candidate.site, float("inf"))
                capacity[site, candidate] = float("inf")
                capacity[candidate, "answer"] = candidate.weight
            flow = largest_flow(capacity, "gateway", "answer")
            self._shares[key] = {candidate: flow.get((candidate, "answer"), 0.0) for candidate in candidates}
        return self._shares[key]


def largest_flow(capacity, source, sink):
    """(from, to) → flow, by shortest augmenting paths (Edmonds and Karp, 1972)."""
    left = dict(capacity)
    for a, b in capacity:
        left.setdefault((b, a), 0.0)
    neighbours = {}
    for a, b in left:
        neighbours.setdefault(a, []).append(b)
    while True:
        before, queue = {source: None}, deque([source])
        while queue and sink not in before:
            here = queue.popleft()
            for there in neighbours.get(here, ()):
                if there not in before and left[here, there] > 1e-9:
                    before[there] = here
                    queue.append(there)
        if sink not in before:
            return {edge: most - left[edge] for edge, most in capacity.items() if most < float("inf")}
        path, at = [], sink
        while before[at] is not None:
            path.append((before[at], at))
            at = before[at]
        step = min(left[edge] for edge in path)
        for a, b in path:
            left[a, b] -= step
            left[b, a] += step
