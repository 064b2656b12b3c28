"""The ``fabrictool`` command: assembles the sub-commands and turns errors into exit codes.

Commands import what they need when they run, so that ``fabrictool --help`` stays fast.
"""

from __future__ import annotations

import sys

import typer

from fabrictool.base.errors import FabrictoolError
from fabrictool.base.files import file_error
from fabrictool.cli import (
    blueprint_commands,
    bootstrap_command,
    discover_command,
    fabric_commands,
    gateway_commands,
    help_commands,
    instance_commands,
    observe_command,
    shell_command,
    show_command,
    simulate_commands,
    state_commands,
    trust_commands,
)
from fabrictool.cli.output import print_problems


def build() -> typer.Typer:
    """The whole command tree."""
    app = typer.Typer(
        name="fabrictool",
        help="Serve LLMs on a federation of clusters: reviewed YAML in, OpenAI-compatible serving out.",
        no_args_is_help=True,
        add_completion=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    for room in (
        blueprint_commands,
        show_command,
        fabric_commands,
        observe_command,
        simulate_commands,
        instance_commands,
        gateway_commands,
        state_commands,
        trust_commands,
        discover_command,
        bootstrap_command,
        shell_command,
        help_commands,
    ):
        room.register(app)
    return app


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code of architecture.md's table."""
    arguments = sys.argv[1:] if argv is None else argv
    command = typer.main.get_command(build())
    try:
        result = command.main(arguments, prog_name="fabrictool", standalone_mode=False)
    except FabrictoolError as error:
        print_problems(error.problems, as_json="--json" in arguments)
        return error.exit_code
    except (typer.Abort, KeyboardInterrupt):
        print("fabrictool: interrupted", file=sys.stderr)
        return 130
    except typer.TyperException as error:
        return _usage_error(error)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has gone; Python would complain once more at exit
        return 0
    except OSError as error:
        failure = file_error(error, error.filename or "the file")
        print_problems(failure.problems, as_json="--json" in arguments)
        return failure.exit_code
    return result if isinstance(result, int) else 0


def _usage_error(error: typer.TyperException) -> int:
    """A wrong command line; the parser's own exit code, 2, means "changes" here."""
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        print(error.format_message())
        return 0
    print(f"fabrictool: error[FT9001]: {error.format_message()}", file=sys.stderr)
    if context is not None:
        print(f"{context.get_usage()}\n      hint: {context.command_path} --help", file=sys.stderr)
    return 64


if __name__ == "__main__":
    sys.exit(main())
