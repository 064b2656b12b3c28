"""The ``fabrictool`` command: assembles the sub-commands and turns errors into exit codes.

Commands import what they need when they run, so that ``fabrictool --help`` stays fast.
"""

from __future__ import annotations

import sys

import click
import typer

from fabrictool.base.errors import FabrictoolError
from fabrictool.cli import blueprint_commands, fabric_commands, gateway_commands, help_commands, trust_commands
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
    for room in (blueprint_commands, fabric_commands, gateway_commands, trust_commands, help_commands):
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
    except (click.exceptions.Abort, KeyboardInterrupt):
        print("fabrictool: interrupted", file=sys.stderr)
        return 130
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message())
        return 0
    except click.ClickException as error:
        # Usage errors would end with 2, which means "changes" here.
        print(f"fabrictool: error[FT9001]: {error.format_message()}", file=sys.stderr)
        if isinstance(error, click.UsageError) and error.ctx is not None:
            print(f"{error.ctx.get_usage()}\nhint: {error.ctx.command_path} --help", file=sys.stderr)
        return 64
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has gone; Python would complain once more at exit
        return 0
    return result if isinstance(result, int) else 0


if __name__ == "__main__":
    sys.exit(main())
