"""Owns a visit of the page: a browser's context in which a script error, or a request to another host, is a fault.

Must not know what the page shows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, Page

WAIT_MS = 20_000
LOOK_MS = 200


@contextmanager
def visit(browser: Browser, address: str) -> Iterator[Page]:
    """A page of a new context, not yet opened. Fails at its end if there was a fault."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page, faults = context.new_page(), list[str]()
    page.set_default_timeout(WAIT_MS)
    page.on("pageerror", lambda error: faults.append(f"script: {error}"))
    page.on("request", lambda request: faults.append(request.url) if foreign(request.url, address) else None)
    yield page
    context.close()
    assert not faults


def foreign(url: str, address: str) -> bool:
    """Whether a request leaves the platform."""
    return not url.startswith((address, "data:", "blob:"))


def eventually(page: Page, holds: Callable[[], bool], what: str, deadline_s: float) -> None:
    """Wait until `holds` is true. Playwright's own wait, so that the page's events are handled meanwhile."""
    ends = time.monotonic() + deadline_s
    while not holds():
        shown = page.locator("body").inner_text()[-3000:]
        assert time.monotonic() < ends, f"{what} did not happen within {deadline_s:g} s; the page shows\n{shown}"
        page.wait_for_timeout(LOOK_MS)
