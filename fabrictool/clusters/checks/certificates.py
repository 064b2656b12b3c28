"""Before anything is planned: the certificates with which login nodes would be entered."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from fabrictool.base.errors import FabrictoolError, Place
from fabrictool.clusters.connections.factory import endpoint_of
from fabrictool.clusters.connections.identities import check_certificate

if TYPE_CHECKING:
    from fabrictool.base.errors import Problem
    from fabrictool.domain.inventory import Inventory

NEEDED_S = 600.0
"""A plan is made, read and carried out; it shall not be cut off in the middle."""
_ENDS = frozenset(["FT5307", "FT5308"])


def check_certificates(inventory: Inventory) -> None:
    """Refuse when every login node of an enabled cluster would be entered with a certificate that is over or nearly so.

    What else is wrong with a login (no key, no secret) makes its cluster unknown later, and that is said then.

    Raises
    ------
    FabrictoolError
        FT5307 and FT5308, one for each cluster, which is named.
    """
    problems: list[Problem] = []
    for name, cluster in inventory.clusters.items():
        if cluster.enabled and cluster.login:
            problems += _cluster(name, inventory)
    if problems:
        raise FabrictoolError(problems)


def _cluster(name: str, inventory: Inventory) -> list[Problem]:
    over: list[Problem] = []
    for login in inventory.clusters[name].login:
        if login.opened_by_hand:
            return []
        try:
            check_certificate(endpoint_of(login, os.environ), time.time(), NEEDED_S)
        except FabrictoolError as error:
            if any(problem.code not in _ENDS for problem in error.problems):
                return []
            over += error.problems
        else:
            return []
    return [
        replace(problem, message=f"{name}: {problem.message}", place=Place(thing=f"cluster/{name}"))
        for problem in over[:1]
    ]
