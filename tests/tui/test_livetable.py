"""What a table paints again is all that has changed, and little else."""

import random
from itertools import count

import pytest
from rich.cells import cell_len
from textual.app import App
from textual.geometry import Region

from fabrictool.tui.rows import LEVELS, TableRow
from fabrictool.tui.screens.livetable import HEADING, LiveTable

COLUMNS = ("NODE", "STATE", "TYPE", "RUN")
WIDTH, HEIGHT = 60, 12


class OneTable(App):
    """It, and which regions of it were to be painted again."""

    CSS = "LiveTable { height: 12; }"

    def compose(self):
        yield Watched(COLUMNS, id="table")

    @property
    def table(self):
        return self.query_one(LiveTable)


class Watched(LiveTable):
    """Notes what is to be painted again."""

    painted_again: list[Region]
    all_again = False

    def refresh(self, *regions, repaint=True, layout=False, recompose=False):
        self.__dict__.setdefault("painted_again", []).extend(regions)
        self.all_again |= not regions
        return super().refresh(*regions, repaint=repaint, layout=layout, recompose=recompose)


def screen_of(table):
    """(column, line) → the letter there and its style; the second half of a wide letter is ""."""
    place = {}
    for y in range(table.size.height):
        x = 0
        for segment in table.render_line(y):
            for letter in segment.text:
                if cell_len(letter):
                    place[x, y] = letter, segment.style
                else:
                    place[x - 1, y] = place[x - 1, y][0] + letter, segment.style
                x += cell_len(letter)
    return place


def row(number, rng=None):
    if rng is None:
        return TableRow(f"n{number}", (f"n{number:02}", "SERVING", "a row", "7"))
    words = rng.choice(("up", "a word", "two words here", "長い名前", "é–…", "長u\u0308"))
    return TableRow(f"n{number}", (f"n{number:02}", rng.choice(("SERVING", "LEFT")), words, str(rng.randrange(120))),
                    rng.choice(LEVELS))  # fmt: skip


def play(rng, table, rows, numbers):
    """One thing that a look or a key does; `rows` are those of the newest look."""
    act = rng.choice(
        ("some", "some", "all", "order", "fewer", "more", "sort", "filter", "mark", "cursor", "scroll", "wide")
    )
    if act in ("some", "all") and rows:
        chosen = range(len(rows)) if act == "all" else [rng.randrange(len(rows)) for _ in range(3)]
        for at in chosen:
            rows[at] = row(int(rows[at].key[1:]), rng)
    elif act == "order":
        rng.shuffle(rows)
    elif act == "fewer" and rows:
        del rows[rng.randrange(len(rows))]
    elif act == "more":
        rows.insert(rng.randint(0, len(rows)), row(next(numbers), rng))
    elif act == "sort":
        table.sort_by_next()
    elif act == "filter":
        table.wanted = rng.choice(("", "", "1", "!left", "~nn"))
    elif act == "mark":
        table.mark()
    elif act == "cursor":
        table.move_cursor(rng.randint(-2, len(rows) + 2))
    elif act == "scroll":
        table.scroll_to(y=rng.randint(0, 20), animate=False)
    table.give(list(rows), rng.choice((WIDTH, 40)) if act == "wide" else WIDTH)
    return act


@pytest.mark.asyncio
@pytest.mark.parametrize("seed", [7, random.randrange(1 << 32)])
async def test_whatever_changed_is_painted_again(seed):
    rng, app = random.Random(seed), OneTable()
    async with app.run_test(size=(WIDTH, HEIGHT)) as pilot:
        table, numbers = app.table, count(30)
        rows = [row(number) for number in range(20)]
        table.give(list(rows), WIDTH)
        await pilot.pause()
        for _ in range(80):
            before, table.painted_again, table.all_again = screen_of(table), [], False
            under, there = table.key_under_cursor, {row.key for row in rows}
            act = play(rng, table, rows, numbers)
            now = screen_of(table)
            if not table.all_again:
                stale = {
                    place for place in now if before.get(place) != now[place]
                    and not any(region.contains(*place) for region in table.painted_again)
                }  # fmt: skip
                assert not stale, act
            if act not in ("mark", "cursor", "filter") and under in {row.key for row in table.rows} & there:
                assert table.key_under_cursor == under
            assert 0 <= table.cursor_row < max(1, table.row_count)
            await pilot.pause()


@pytest.mark.asyncio
async def test_a_mark_takes_no_letter_of_a_name_and_what_is_cut_says_so():
    app = OneTable()
    async with app.run_test(size=(WIDTH, HEIGHT)) as pilot:
        app.table.give([TableRow(f"n{n}", (f"計算節點-{n}", "UP", "長い名前" * 9, "1")) for n in range(3)], WIDTH)
        await pilot.press("space")
        app.table.mark()
        lines = ["".join(segment.text for segment in app.table.render_line(y)) for y in range(4)]
        assert [line[:7] for line in lines[1:4]] == ["●計算節點-0", " 計算節點-1", " 計算節點-2"]
        assert all("…" in line for line in lines[1:4])
        assert {cell_len(line) for line in lines} == {WIDTH}


@pytest.mark.asyncio
async def test_of_a_row_only_what_changed_is_painted_again():
    app = OneTable()
    async with app.run_test(size=(WIDTH, HEIGHT)) as pilot:
        table, rows = app.table, [row(number) for number in range(40)]
        table.give(list(rows), WIDTH)
        await pilot.pause()
        table.painted_again, table.all_again = [], False
        table.give(list(rows), WIDTH)
        assert (table.painted_again, table.all_again) == ([], False)
        rows[3] = TableRow("n3", ("n03", "SERVING", "a now", "8"))
        rows[39] = TableRow("n39", ("n39", "SERVING", "a now", "8"))
        table.give(list(rows), WIDTH)
        line = "".join(segment.text for segment in table.render_line(HEADING + 3))
        start, end = line.index("now"), line.index("8") + 1
        assert (table.painted_again, table.all_again) == ([Region(start, HEADING + 3, end - start, 1)], False)


@pytest.mark.asyncio
async def test_keys_and_clicks_move_the_cursor_and_open_a_row():
    opened = []

    class Listening(OneTable):
        def on_live_table_opened(self, event):
            opened.append(event.table.key_under_cursor)

    app = Listening()
    async with app.run_test(size=(WIDTH, HEIGHT)) as pilot:
        table = app.table
        await pilot.press("enter", "down", "space")
        assert (table.key_under_cursor, opened) == (None, [])
        table.give([row(number) for number in range(40)], WIDTH)
        table.focus()
        in_sight = HEIGHT - HEADING
        for key, at, top in (
            ("up", 0, 0), ("down", 1, 0), ("pagedown", 1 + in_sight, 2), ("end", 39, 40 - in_sight),
            ("down", 39, 40 - in_sight), ("pageup", 39 - in_sight, 39 - in_sight), ("home", 0, 0),
        ):  # fmt: skip
            await pilot.press(key)
            await pilot.pause()
            assert (table.cursor_row, table.scroll_offset.y) == (at, top), key
        await pilot.press("enter")
        await pilot.click("#table", offset=(3, HEADING + 4))
        await pilot.click("#table", offset=(3, HEADING + 4))
        await pilot.click("#table", offset=(3, 0))
        assert opened == ["n0", "n4"]
        table.give([], WIDTH)
        await pilot.press("down", "end", "enter")
        assert (table.key_under_cursor, opened) == (None, ["n0", "n4"])
