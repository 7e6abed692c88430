"""Owns the browser of the page's tests: Debian's chromium, driven by Playwright.

Must not download a browser; without one the tests are skipped, with the name of its package.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.browser.scene import gateway
from tests.browser.visits import WAIT_MS, visit
from tests.harness.api_access import TOKEN
from tests.harness.programs import needed
from tests.harness.servers.redis_servers import embedded_server


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for the tests of a file: while it is open its loop runs, in which no other test could run its own."""
    chromium = needed("chromium")
    expect.set_options(timeout=WAIT_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A gateway over runs that have a history, in a Redis of their own."""
    with embedded_server() as server, gateway(f"redis://127.0.0.1:{server.port}/0") as found:
        yield found


@pytest.fixture
def page(browser: Browser, address: str) -> Iterator[Page]:
    """A page that is signed in."""
    with visit(browser, address) as page:
        page.goto(f"{address}/#token={TOKEN}")
        page.get_by_role("heading", name="Runs").wait_for()
        yield page


@pytest.fixture
def shots(tmp_path: Path) -> Path:
    """The folder for screenshots."""
    return tmp_path
