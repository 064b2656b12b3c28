"""A real Chromium without a window, led by its DevTools."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

import aiohttp
import pytest

from tests.gateway.conftest import until

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
PATIENCE_S = 60


class Chromium:
    """`go` to a page, `submit` a form of it, `run` a script there."""

    async def start(self):
        program = next(filter(None, map(shutil.which, PROGRAMS)), None)
        if program is None:
            pytest.skip(f"no browser is installed ({', '.join(PROGRAMS)})")
        self._folder = Path(tempfile.mkdtemp(prefix="ftchromium"))
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-port=0"]
        command = [program, *options, f"--user-data-dir={self._folder}", "about:blank"]
        self._process = await asyncio.create_subprocess_exec(
            *command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        self._http, self._answers = aiohttp.ClientSession(), {}
        port = self._folder / "DevToolsActivePort"
        await until(lambda: port.exists() and port.read_text().strip(), PATIENCE_S)
        async with self._http.get(f"http://127.0.0.1:{port.read_text().split()[0]}/json/list") as answer:
            page = next(page for page in await answer.json() if page["type"] == "page")
        self._line = await self._http.ws_connect(page["webSocketDebuggerUrl"])
        self._reading = asyncio.create_task(self._read())
        return self

    async def stop(self):
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        await self._line.close()
        await self._http.close()
        os.killpg(self._process.pid, signal.SIGKILL)  # it is many
        await self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def go(self, url):
        await self._until_replaced(self._call("Page.navigate", {"url": url}))

    async def submit(self, action, **fields):
        """The first form whose address has `action` in it, as somebody who fills it in and presses its button."""
        script = """(([action, fields]) => {
          const form = [...document.forms].find(form => form.getAttribute('action').includes(action));
          for (const [name, value] of Object.entries(fields)) form.querySelector(`[name=${name}]`).value = value;
          form.requestSubmit();
        })(%s)"""
        await self._until_replaced(self.run(script % json.dumps([action, fields])))

    async def run(self, script):
        answer = await self._call("Runtime.evaluate", {"expression": script, "returnByValue": True})
        assert "exceptionDetails" not in answer["result"], answer
        return answer["result"]["result"].get("value")

    async def _until_replaced(self, act):
        """Until another document is there, whole: events of loading may be the former one's."""
        await self.run("window.former = true")
        await act
        deadline = asyncio.get_running_loop().time() + PATIENCE_S
        look = {"expression": "!window.former && document.readyState === 'complete'", "returnByValue": True}
        while True:
            answer = await self._call("Runtime.evaluate", look)  # an error while documents change
            if answer.get("result", {}).get("result", {}).get("value") is True:
                return
            assert asyncio.get_running_loop().time() < deadline
            await asyncio.sleep(0.02)

    async def _call(self, method, params):
        number = len(self._answers)
        self._answers[number] = asyncio.get_running_loop().create_future()
        await self._line.send_str(json.dumps({"id": number, "method": method, "params": params}))
        return await asyncio.wait_for(self._answers[number], PATIENCE_S)

    async def _read(self):
        async for message in self._line:
            event = json.loads(message.data)
            if "id" in event:
                self._answers[event["id"]].set_result(event)
