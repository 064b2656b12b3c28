"""A word to whoever has no compiler for the simulator's loop: all is right then, and slow."""

from __future__ import annotations

from fabrictool.cli.output import say


def say_if_interpreted() -> None:
    """One line on stderr where the loop is not compiled here."""
    from fabrictool.simulator import kernel

    if not kernel.COMPILED:
        say(
            "warning: numba is not installed here, so simulations take some hundred times as long;"
            " `pip install 'fabrictool[simulator]'` brings it"
        )
