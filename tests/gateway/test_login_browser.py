"""The pages in a real browser: what it makes of their policies, no client of a test's own can tell."""

import re

import pytest

from tests.gateway.chromium import Chromium
from tests.gateway.test_login import LoginBed


@pytest.mark.asyncio
async def test_somebody_makes_a_key_and_ends_it_in_a_browser(tmp_path):
    browser = await Chromium().start()
    bed = await LoginBed(tmp_path).start()
    try:
        await browser.go(f"{bed.url}/login")
        await browser.submit("/interaction/", login="anna", password="any")
        await browser.submit("/interaction/")  # consent
        assert await browser.run("location.pathname") == "/login/keys"
        assert await browser.run("getComputedStyle(document.querySelector('button')).cursor") == "pointer", "styled"
        await browser.submit("/login/keys", name="laptop")
        text = await browser.run("document.body.innerText")
        key = re.search(r"sk-[A-Za-z0-9_-]{43}", text)
        assert key, text
        assert await bed.status_of(key[0], max_tokens=4) == 200
        await browser.submit("/login/keys/end")
        assert await bed.status_of(key[0], max_tokens=4) == 401
        await browser.submit("/login/out")
        assert "signed out" in await browser.run("document.body.innerText")
    finally:
        await browser.stop()
        await bed.stop()
