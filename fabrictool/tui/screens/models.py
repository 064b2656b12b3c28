"""The second screen: models."""

from __future__ import annotations

from typing import ClassVar

from fabrictool.tui.rows import MODEL_COLUMNS
from fabrictool.tui.screens.table import TableScreen


class ModelsScreen(TableScreen):
    """One row for each model."""

    TITLE_TEXT: ClassVar[str] = "Models"
    COLUMNS: ClassVar[tuple[str, ...]] = MODEL_COLUMNS
    EMPTY: ClassVar[str] = "no model is served yet"
