"""Pictures of `top` for the documentation: a fabric that is made up, always the same. `python -m tests.tui.pictures`
writes them; a test compares.
"""

import asyncio
import re
from pathlib import Path

from fabrictool.tui.app import NAMES, Top
from fabrictool.tui.feeds import MadeUpFabric, Playback

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"
BEGUN, LOOKS = 1_800_000_000.0, 84
SIZE = (110, 30)
WITHOUT_PAGE = ("mesh",)
"""A fabric that is made up has no mesh to look into."""


def looks():
    feed = MadeUpFabric(24, begun=BEGUN)
    return [feed.look() for _ in range(LOOKS)]


async def _drawn():
    replay = Playback(looks())
    replay.at = LOOKS - 1
    pictures = {}
    app = Top(replay, 3600.0)
    async with app.run_test(size=SIZE) as pilot:
        for number, name in enumerate(NAMES, 1):
            await pilot.press(str(number))
            for _ in range(5):
                await pilot.pause()
            if name not in WITHOUT_PAGE:
                pictures[f"top-{name}.svg"] = app.export_screenshot(title=f"fabrictool top: {name}")
        await pilot.press("2", "enter")
        for _ in range(5):
            await pilot.pause()
        pictures["top-model.svg"] = app.export_screenshot(title="fabrictool top: a model in full")
    return {name: _plain(svg) for name, svg in pictures.items()}


def _plain(svg):
    """Without fonts from elsewhere: a page of ours asks no stranger."""
    svg = re.sub(r"@font-face \{.*?\}\n", "", svg, flags=re.DOTALL)
    return "\n".join(line.rstrip() for line in svg.splitlines()) + "\n"


def drawn():
    return asyncio.run(_drawn())


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for picture, text in drawn().items():
        (FOLDER / picture).write_text(text)
