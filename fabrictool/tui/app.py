"""``fabrictool top``: asks a status URL once a second and shows what it says; no key changes anything."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, ClassVar

from textual.app import App
from textual.widgets import Static

from fabrictool.base.errors import FabrictoolError
from fabrictool.base.text import visible
from fabrictool.status.documents import GatewayStatus
from fabrictool.status.fleet import FleetStatus
from fabrictool.tui.fleet_rows import fleet_cluster_rows, fleet_headline, fleet_model_rows, fleet_node_rows
from fabrictool.tui.rows import age_text, agent_rows, cluster_rows, headline, model_rows, node_rows
from fabrictool.tui.screens.models import ModelsScreen
from fabrictool.tui.screens.nodes import NodesScreen
from fabrictool.tui.screens.overview import OverviewScreen
from fabrictool.tui.screens.table import TableScreen

if TYPE_CHECKING:
    from collections.abc import Callable

    from textual.binding import BindingType

    from fabrictool.status.fleet import LiveDocument
    from fabrictool.tui.rows import TableRow

SCREENS_BY_NAME = {"overview": OverviewScreen, "models": ModelsScreen, "nodes": NodesScreen}


class Top(App[None]):
    """The whole terminal UI."""

    CSS = """
    #headline { height: auto; max-height: 5; padding: 0 1; background: $panel; }
    #tabs { height: 1; padding: 0 1; color: $text-muted; }
    #empty { padding: 1 2; color: $text-muted; }
    #table { height: auto; max-height: 100%; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        ("1", "show('overview')", "overview"),
        ("2", "show('models')", "models"),
        ("3", "show('nodes')", "nodes"),
        ("q", "quit", "quit"),
    ]

    def __init__(
        self, ask: Callable[[], LiveDocument], interval_s: float, clock: Callable[[], float] = time.time
    ) -> None:
        super().__init__()
        self._ask = ask
        self._interval = interval_s
        self._clock = clock
        self._document: LiveDocument | None = None
        self._trouble = ""
        self._since: float | None = None
        """When the first question in a row was not answered."""
        self._shown = "overview"

    def on_mount(self) -> None:
        for name, screen in SCREENS_BY_NAME.items():
            self.install_screen(screen(self.redraw), name)
        self.push_screen("overview")
        self.run_worker(self._keep_asking(), exclusive=True)

    def action_show(self, name: str) -> None:
        self._shown = name
        self.switch_screen(name)
        self.redraw()

    async def _keep_asking(self) -> None:
        while True:
            try:
                self._document = await asyncio.to_thread(self._ask)
                self._trouble, self._since = "", None
            except FabrictoolError as error:
                self._trouble = visible(error.problems[0].message)
                self._since = self._clock() if self._since is None else self._since
            self.redraw()
            await asyncio.sleep(self._interval)

    def redraw(self) -> None:
        """Show the last document on the current screen."""
        screen = self.screen
        if not isinstance(screen, TableScreen) or not screen.ready or not screen.query("#headline"):
            return
        if self._document is None:
            screen.query_one("#headline", Static).update(self._complaint() or "connecting …")
            return
        age = max(0.0, self._clock() - self._document.at)
        document, told = self._document, age_text(age)
        head = fleet_headline(document, told) if isinstance(document, FleetStatus) else headline(document, told)
        lines = [self._complaint(), visible(head)]
        screen.show("\n".join(filter(None, lines)), self._tabs(), self._rows(screen))

    def _complaint(self) -> str:
        """Why there is no news, for how long, and that it is not over."""
        if self._since is None:
            return ""
        silent = max(0.0, self._clock() - self._since)
        return f"! NO ANSWER for {silent:.0f} s: {self._trouble}; asking again every {self._interval:g} s"

    def _rows(self, screen: TableScreen) -> list[TableRow]:
        document = self._document
        if isinstance(document, GatewayStatus):
            if isinstance(screen, ModelsScreen):
                return model_rows(document)
            return node_rows(document) if isinstance(screen, NodesScreen) else cluster_rows(document)
        if isinstance(document, FleetStatus):
            if isinstance(screen, ModelsScreen):
                return fleet_model_rows(document)
            return fleet_node_rows(document) if isinstance(screen, NodesScreen) else fleet_cluster_rows(document)
        if document is not None and isinstance(screen, NodesScreen):
            return agent_rows(document)
        return []

    def _tabs(self) -> str:
        names = [f"{number} {screen.TITLE_TEXT}" for number, screen in enumerate(SCREENS_BY_NAME.values(), 1)]
        current = list(SCREENS_BY_NAME).index(self._shown)
        names[current] = f"[reverse] {names[current]} [/reverse]"
        return "   ".join(names)


def run(ask: Callable[[], LiveDocument], interval_s: float) -> None:
    """Show what `ask` answers until the user quits; raises what it raises when there is no answer at first."""
    ask()
    Top(ask, interval_s).run()
