"""The loopback pages of a unit: ``/status``, ``/fleet``, ``/log`` and so on; GET changes nothing."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from aiohttp import web

from fabrictool.base.errors import FabrictoolError, UsageError
from fabrictool.status.documents import StatusDocument, encode

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from fabrictool.base.runfolder import RunFolder

    View = Callable[[Mapping[str, str]], Awaitable[bytes]]
    """Makes a document; raises UsageError for words that mean nothing to it."""

MAX_LOG_LINES = 5000
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


async def serve_status(
    document: Callable[[], StatusDocument],
    folder: RunFolder | None = None,
    *,
    metrics: Callable[[], bytes] | None = None,
    views: Mapping[str, View] = MappingProxyType({}),
) -> web.AppRunner:
    """Listen on a free loopback port; the port is in ``runner.addresses``. The caller cleans the runner up.

    Without `folder` there is no ``/log``, without `metrics` no ``/metrics``; `views` are further documents, by
    path; they are given the words of the query.
    """

    async def status(_: web.Request) -> web.Response:
        return web.Response(body=encode(document()), content_type="application/json")

    async def health(_: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    app = web.Application()
    app.add_routes([web.get("/status", status), web.get("/health", health)])
    app.add_routes([web.get(path, _view_page(view)) for path, view in views.items()])
    if folder is not None:
        app.add_routes([web.get("/log", _log_page(folder))])
    if metrics is not None:
        app.add_routes([web.get("/metrics", _metrics_page(metrics))])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner


def _log_page(folder: RunFolder) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def log(request: web.Request) -> web.Response:
        try:
            lines = min(MAX_LOG_LINES, max(1, int(request.query.get("lines", "200"))))
        except ValueError:
            raise web.HTTPBadRequest(text="lines: a whole number") from None
        try:
            tail = folder.log_tail(lines)
        except FabrictoolError as error:
            raise web.HTTPInternalServerError(text=str(error)) from error
        return web.Response(text="\n".join(tail) + "\n")

    return log


def _view_page(view: View) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def page(request: web.Request) -> web.Response:
        try:
            body = await view(request.query)
        except UsageError as error:
            raise web.HTTPBadRequest(text=str(error)) from error
        return web.Response(body=body, content_type="application/json")

    return page


def _metrics_page(metrics: Callable[[], bytes]) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def series(_: web.Request) -> web.Response:
        return web.Response(body=metrics(), headers={"content-type": METRICS_TYPE})

    return series
