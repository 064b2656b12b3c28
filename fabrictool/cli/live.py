"""Who ``top`` asks, again and again: a URL, or the fabric's gateway wherever it is now."""

from __future__ import annotations

import contextlib
import os
from contextlib import ExitStack
from typing import TYPE_CHECKING, Self

from fabrictool.base.errors import FabrictoolError, UsageError
from fabrictool.cli.watching import gateway_url
from fabrictool.status.client import NoFleetError, fetch, fetch_fleet
from fabrictool.status.documents import AgentStatus

if TYPE_CHECKING:
    from fabrictool.cli.source import Source
    from fabrictool.status.fleet import LiveDocument

ANSWER_S = 3.0


class LiveStatus:
    """Ask by calling it; to be used as a context.

    After a question that was not answered the gateway is looked for anew: it may have been replaced, or the way to it
    through a login node may have been cut.
    """

    def __init__(self, source: Source, url: str, key: str) -> None:
        self._source = source
        self._given = url
        self._key = key
        self._url = url
        self._way = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._way.close()

    def __call__(self) -> LiveDocument:
        """The document, of an agent what it knows of the fleet.

        Raises FT5201 and FT5202, and what looking for the gateway raises.
        """
        try:
            if not self._url:
                self._url = self._way.enter_context(gateway_url(self._source))
            document = fetch(self._url, timeout_s=ANSWER_S, key=self._key)
            if isinstance(document, AgentStatus):
                with contextlib.suppress(NoFleetError):  # of an earlier release: its own document is all that it has
                    return fetch_fleet(self._url, timeout_s=ANSWER_S)
            return document
        except FabrictoolError:
            self._way.close()
            self._url = self._given
            raise


def key_of(reference: str) -> str:
    """The key behind ``secret://…``; "" without one. A key itself is refused: other users of this machine see it.

    Raises
    ------
    FabrictoolError
        FT9001 no reference, FT14xx it cannot be had.
    """
    from fabrictool.base.units import UnitError
    from fabrictool.blueprint.secrets import resolve
    from fabrictool.domain.secrets import SecretRef

    if not reference:
        return ""
    try:
        return resolve(SecretRef.parse(reference), os.environ)
    except UnitError as error:
        raise UsageError.of("FT9001", "--key takes a reference, not the key", hint="--key secret://env/NAME") from error
