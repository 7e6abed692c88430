"""Owns the browser of the page's tests: Debian's chromium, driven by Playwright.

Must not download a browser; without one the tests are skipped, with the name of its package.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from tests.browser.scene import gateway
from tests.harness.api_access import TOKEN
from tests.harness.programs import needed

WAIT_MS = 20_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for the tests of a file: while it is open its loop runs, in which no other test could run its own."""
    chromium = needed("chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def address(redis_url: str) -> Iterator[str]:
    """A gateway over runs that have a history."""
    with gateway(redis_url) as found:
        yield found


@pytest.fixture
def page(browser: Browser, address: str) -> Iterator[Page]:
    """A page that is signed in. A script error, or a request to another host, fails the test."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page, faults = context.new_page(), list[str]()
    page.set_default_timeout(WAIT_MS)
    page.on("pageerror", lambda error: faults.append(f"script: {error}"))
    page.on("request", lambda request: faults.append(request.url) if foreign(request.url, address) else None)
    page.goto(f"{address}/#token={TOKEN}")
    page.get_by_role("heading", name="Runs").wait_for()
    yield page
    context.close()
    assert not faults


def foreign(url: str, address: str) -> bool:
    """Whether a request leaves the platform."""
    return not url.startswith((address, "data:", "blob:"))


@pytest.fixture
def shots(tmp_path: Path) -> Path:
    """The folder for screenshots."""
    return tmp_path
