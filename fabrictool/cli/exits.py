"""What a program of ours says and returns when it ends by an error; it imports next to nothing before one comes."""

from __future__ import annotations

import sys

from fabrictool.cli.interrupts import INTERRUPTED, MESSAGE, HearingInterrupts, HoldingInterrupts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


def answered(act: Callable[[], int], *, as_json: bool) -> int:
    """What `act` returns, or the exit code of what it raises, which is said."""
    with HearingInterrupts():
        try:
            HoldingInterrupts.release()
            return _coded(act, as_json=as_json)
        except KeyboardInterrupt:
            print(f"\n{MESSAGE}", file=sys.stderr)
            return INTERRUPTED


def _coded(act: Callable[[], int], *, as_json: bool) -> int:
    from fabrictool.base.errors import FabrictoolError
    from fabrictool.base.files import file_error
    from fabrictool.cli.output import print_problems

    try:
        return act()
    except FabrictoolError as error:
        print_problems(error.problems, as_json=as_json)
        return error.exit_code
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has gone; Python would complain once more at exit
        return 0
    except OSError as error:
        failure = file_error(error, error.filename or "the file")
        print_problems(failure.problems, as_json=as_json)
        return failure.exit_code
