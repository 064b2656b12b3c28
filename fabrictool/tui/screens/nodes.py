"""The third screen: nodes and what runs on them."""

from __future__ import annotations

from typing import ClassVar

from fabrictool.tui.rows import NODE_COLUMNS
from fabrictool.tui.screens.table import TableScreen


class NodesScreen(TableScreen):
    """One row for each service, and one for a node without any."""

    TITLE_TEXT: ClassVar[str] = "Nodes"
    COLUMNS: ClassVar[tuple[str, ...]] = NODE_COLUMNS
    EMPTY: ClassVar[str] = "no node has joined yet"
