"""The page in a real browser, over runs with a history: what it shows, by keyboard, narrow, dark, and accessible."""

import json
import re
from pathlib import Path

import axe_playwright_python
import pytest
from playwright.sync_api import expect

from tests.browser.scene import GROUP, STEPS
from tests.browser.visits import WAIT_MS
from tests.harness.api_access import TOKEN
from tests.harness.each import each

AXE = (Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text()
VIEWS = (
    ("#/runs", "Runs"),
    ("#/runs/browser-running", "browser-running"),
    ("#/runs/browser-running/samples", "browser-running"),
    ("#/runs/browser-running/settings", "browser-running"),
    ("#/runs/browser-running/logs", "browser-running"),
    ("#/runs/browser-running/files", "browser-running"),
    ("#/runs/browser-running/evaluations", "browser-running"),
    ("#/runs/browser-running/ledger", "browser-running"),
    ("#/runs/browser-running/events", "browser-running"),
    (f"#/runs/browser-running/groups/{GROUP}", f"Group {GROUP}"),
    ("#/compare?runs=browser-running,browser-failed", "Compare runs"),
    ("#/create", "New run"),
    ("#/queue", "Queue"),
    ("#/projects", "Projects"),
)


def opened(page, address, view, heading):
    page.evaluate("hash => { location.hash = hash }", view)
    page.get_by_role("heading", name=heading, exact=True, level=1).wait_for()
    expect(page.get_by_text(re.compile("^Loading "))).to_have_count(0, timeout=WAIT_MS)


def violations(page):
    """Serious faults that axe-core finds, as text. The page's policy forbids scripts of others, so it is evaluated."""
    page.evaluate(AXE)
    found = page.evaluate("axe.run(document, {runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa']})")
    return [
        f"{fault['id']}: {fault['help']}: {json.dumps([node['html'][:200] for node in fault['nodes'][:3]])}"
        for fault in found["violations"]
        if fault["impact"] in ("serious", "critical")
    ]


def test_the_token_of_the_link_leaves_the_address(page):
    assert TOKEN not in page.url
    assert page.evaluate("localStorage.length") == 0
    page.get_by_role("button", name="Sign out").click()
    page.get_by_label("Token").fill("wrong")
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("alert")).to_contain_text("not valid")
    page.get_by_label("Token").fill(TOKEN)
    page.get_by_role("button", name="Sign in").click()
    page.get_by_role("heading", name="Runs").wait_for()


def test_runs_are_listed_and_filtered(page):
    expect(page.get_by_role("link", name="browser-running")).to_be_visible()
    page.get_by_label("State").select_option("failed")
    expect(page.get_by_role("link", name="browser-running")).to_have_count(0)
    expect(page.get_by_role("link", name="browser-failed")).to_be_visible()


def test_a_run_shows_curves_groups_and_events(page, address):
    opened(page, address, "#/runs/browser-running", "browser-running")
    expect(page.get_by_role("img", name=f"Accuracy over {STEPS} rollout steps")).to_be_visible()
    for title in ("Reward", "Entropy", "Clip fractions", "Staleness", "Parity", "Groups by what became of them"):
        expect(page.get_by_role("img", name=f"{title} over {STEPS} rollout steps")).to_be_visible()
    expect(page.get_by_role("img", name="Group accuracy: last step")).to_be_visible()
    expect(page.get_by_text("rollout <b>not markup</b>")).to_be_visible()


@each(
    "view, heading, scheme",
    [*((*view, "light") for view in VIEWS), *((*view, "dark") for view in VIEWS[:2])],
)
def test_no_serious_violation(page, address, view, heading, scheme):
    page.emulate_media(color_scheme=scheme)
    opened(page, address, view, heading)
    assert violations(page) == []


@each("view, heading", VIEWS)
def test_nothing_is_cut_off_at_360_pixels(page, address, view, heading):
    page.set_viewport_size({"width": 360, "height": 740})
    opened(page, address, view, heading)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_the_form_names_what_is_not_valid(page, address):
    opened(page, address, "#/create", "New run")
    page.get_by_label("name", exact=True).fill("tiny")
    page.get_by_label("rollout_steps", exact=True).fill("-1")
    page.get_by_label("rollout_steps", exact=True).blur()
    expect(page.get_by_text("limits.rollout_steps: -1 is not valid").first).to_be_visible()
    expect(page.get_by_role("button", name="Start the run")).to_be_disabled()


def test_the_keyboard_reaches_a_run(page):
    run = page.get_by_role("link", name="browser-running")
    run.wait_for()  # without the list, Tab would only reach the filters and the header
    page.get_by_label("Name contains").focus()
    for _ in range(12):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.textContent") == "browser-running":
            break
    expect(run).to_be_focused()
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="browser-running").wait_for()


def test_the_reference_needs_no_other_host(page, address):
    page.goto(f"{address}/docs")
    expect(page.get_by_text("/v1/runs/{run}/metrics")).to_be_visible()


@pytest.mark.parametrize("path", ["/page/../app.py", "/page/%2e%2e/app.py", "/page/..%2fapp.py", "/page/vendor"])
def test_no_other_file_is_served(page, address, path):
    assert page.request.get(address + path).status in (404, 405)
