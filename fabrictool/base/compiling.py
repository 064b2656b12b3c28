"""What a class of the compiled gateway tells mypyc (hatch_build.py); where nothing is compiled it tells nobody."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from mypy_extensions import mypyc_attr as mypyc_attr  # noqa: PLC0414 - others import it from here
else:
    T = TypeVar("T")

    def mypyc_attr(**_said: Any) -> Callable[[T], T]:
        """As mypy_extensions' own: who runs a gateway does not install it."""
        return lambda said_of: said_of
