"""The first screen: clusters."""

from __future__ import annotations

from typing import ClassVar

from fabrictool.tui.rows import CLUSTER_COLUMNS
from fabrictool.tui.screens.table import TableScreen


class OverviewScreen(TableScreen):
    """One row for each cluster."""

    TITLE_TEXT: ClassVar[str] = "Overview"
    COLUMNS: ClassVar[tuple[str, ...]] = CLUSTER_COLUMNS
    EMPTY: ClassVar[str] = "no node has joined yet"
