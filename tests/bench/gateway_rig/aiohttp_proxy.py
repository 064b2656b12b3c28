"""A reverse proxy as one writes it with aiohttp's server and client: what a well-kept library costs.

python aiohttp_proxy.py ENGINE_PORT PORT KEY
"""

import sys

from aiohttp import ClientSession, web


def main(engine, port, key):
    async def pass_on(request):
        if request.headers.get("authorization") != f"Bearer {key}":
            raise web.HTTPUnauthorized
        body = await request.read()
        url, headers = f"http://127.0.0.1:{engine}{request.path}", {"content-type": "application/json"}
        async with request.app[HTTP].post(url, data=body, headers=headers) as answer:
            if answer.content_type == "application/json":
                return web.Response(body=await answer.read(), content_type="application/json")
            passed = web.StreamResponse(headers={"content-type": answer.headers["content-type"]})
            await passed.prepare(request)
            async for data in answer.content.iter_any():
                await passed.write(data)
            return passed

    async def client(app):
        app[HTTP] = ClientSession()
        yield
        await app[HTTP].close()

    app = web.Application()
    app.router.add_post("/{path:.*}", pass_on)
    app.cleanup_ctx.append(client)
    web.run_app(app, host="127.0.0.1", port=int(port), access_log=None, print=None, handler_cancellation=True)


HTTP = web.AppKey("http", ClientSession)

if __name__ == "__main__":
    main(*sys.argv[1:])
