"""The ``fabrictool`` command: runs one and turns errors into exit codes.

Nothing but the interrupts' handler is imported before `main` listens to Ctrl-C.
"""

from __future__ import annotations

import sys

from fabrictool.cli.exits import answered
from fabrictool.cli.interrupts import INTERRUPTED, leave

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

USAGE = 64
HELP = frozenset({"-h", "--help"})


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code of architecture.md's table."""
    arguments = sys.argv[1:] if argv is None else argv
    return answered(lambda: _run(arguments), as_json="--json" in arguments)


def _run(arguments: list[str]) -> int:
    import os

    import typer

    from fabrictool.cli.bash_words import whole_words
    from fabrictool.cli.commands import build
    from fabrictool.cli.paging import help_paged

    try:
        ours = arguments[: arguments.index("--")] if "--" in arguments else arguments
        asked_for_help = not HELP.isdisjoint(ours) and sys.stdout.isatty()
        with whole_words(os.environ), help_paged(wanted=asked_for_help):
            tree = typer.main.get_command(build(next(iter(arguments), None)))
            result = tree.main(arguments, prog_name="fabrictool", standalone_mode=False)
    except typer.Abort:
        raise KeyboardInterrupt from None  # its word for the end of the input
    except typer.TyperException as error:
        return _usage_error(error)
    if result == INTERRUPTED:  # so the parser says that a KeyboardInterrupt came
        raise KeyboardInterrupt
    return result if isinstance(result, int) else 0


def _usage_error(error: Any) -> int:
    """A wrong command line; the parser's own exit code, 2, means "changes" here."""
    from fabrictool.cli.output import say
    from fabrictool.cli.paging import page

    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        page(error.format_message())
        return 0
    say(f"fabrictool: error[FT9001]: {error.format_message()}")
    if context is not None:
        say(f"{context.get_usage()}\n      hint: {context.command_path} --help")
    return USAGE


def run() -> NoReturn:
    """Of the process: `main`, and its end."""
    leave(main())


if __name__ == "__main__":
    run()
