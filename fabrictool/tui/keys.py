"""The page of keys: what each does, and which are in force."""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual.binding import Binding
from textual.keys import format_key

if TYPE_CHECKING:
    from collections.abc import Mapping

    from textual.dom import DOMNode

PREFIX = "top."
"""Of the ids of actions inside of Textual."""
PAGE = """screens
  {overview} overview   what needs you, since when, why, what to type; clusters
  {models} models     replicas, latencies, SLO, forecast, rates
  {nodes} nodes      engines, load, ends of allocations
  {jobs} jobs       units in the words of their schedulers
  {mesh} mesh       members, who suspects whom, certificates
  {events} events     what happened, newest first
  {plan} plan       what the last apply did, and what has drifted since
  {logs} logs       of the row that was chosen last

rows
  {describe} all about it; enter, too         {logs-of} its log
  {yank} copy the command to type         {mark} mark, for that
  {filter} filter: words, !not, ~fzzy       {clear} clear, back
  {sort} sort by the next column          {turn} turn it

  {go} go: `:jobs`, `:llama-70b`        ctrl+p palette
  {compact} compact                          {keys} this page      {quit} quit

logs
  {search} search     {follow} follow or not     {wrap} wrap

No key changes anything of the fabric: the copied command would."""
REPLAY_PAGE = """replay
  {back-one} {on-one} a look back, forth      {back-many} {on-many} thirty looks back, forth
  {begin} to its begin              {end} to its end"""
COLUMN = ("overview", "models", "nodes", "jobs", "mesh", "events", "plan", "logs", "describe", "yank", "filter", "sort",
          "go", "compact", "search", "back-one", "begin")  # fmt: skip
"""Actions whose keys begin a line: what follows them stands in a column."""


def keys_of(*screens: type[DOMNode]) -> dict[str, str]:
    """Action → its keys by default, as Textual writes them."""
    return {
        binding.id.removeprefix(PREFIX): binding.key
        for screen in screens
        for binding in screen.BINDINGS
        if isinstance(binding, Binding) and binding.id
    }


def key_words(keys: str) -> str:
    """As people call them."""
    return " ".join("esc" if key == "escape" else format_key(key) for key in keys.split(","))


def key_lines(keys: Mapping[str, str], *, replay: bool) -> list[str]:
    """`keys`: action → what is in force, as Textual writes it."""
    words = {name: key_words(given) for name, given in keys.items()}
    width = max(len(words[name]) for name in COLUMN)
    shown = {name: text.ljust(width) if name in COLUMN else text for name, text in words.items()}
    pages = [PAGE, REPLAY_PAGE] if replay else [PAGE]
    return "\n\n".join(pages).format_map(shown).splitlines()
