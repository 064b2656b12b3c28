"""Do the names refer to something, and do the numbers make sense together?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fabrictool.base.errors import Problem

if TYPE_CHECKING:

    from fabrictool.blueprint.tree import Node
    from fabrictool.domain.blueprint import Blueprint
    from fabrictool.domain.inventory import Inventory


def check(blueprint: Blueprint, inventory: Inventory, blueprint_tree: Node, inventory_tree: Node) -> list[Problem]:
    """All problems and warnings, FT12xx."""
    return []
