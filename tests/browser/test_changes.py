"""What is told and changed on the page of a run: the ledger, a group's story, events, edits; all of it by keyboard."""

import json

from playwright.sync_api import expect

from tests.browser.scene import GROUP, GROUP_STEP, VIEWER
from tests.browser.test_page import opened, violations
from tests.harness.api_access import HEADERS
from tests.harness.each import each

RUN = "browser-running"


def patch(page, address, run, **changes):
    """Change settings as another user would."""
    given = {name.replace("__", "."): value for name, value in changes.items()}
    answer = page.request.patch(f"{address}/v1/runs/{run}", headers=HEADERS, data=given)
    assert answer.status == 202, answer.text()


def view_of(page, address, run=RUN):
    return page.request.get(f"{address}/v1/runs/{run}", headers=HEADERS).json()


def edit_dialog(page):
    page.get_by_role("button", name="Edit", exact=True).click()
    dialog = page.get_by_role("dialog", name=f"Edit {RUN}")
    dialog.get_by_label("learner.learning_rate").wait_for()
    return dialog


def test_the_story_names_the_optimizer_step_and_the_checkpoint(page, address):
    opened(page, address, f"#/runs/{RUN}/groups/{GROUP}", f"Group {GROUP}")
    expect(page.get_by_text("Optimizer step 2 of this rollout step trained it: loss 0.25")).to_be_visible()
    expect(page.locator("dt", has_text="Rollout step").locator("+ dd")).to_have_text(str(GROUP_STEP))
    expect(page.get_by_text("step-000010")).to_be_visible()
    expect(page.get_by_text("5: tokens 0\u20132; 6: tokens 3\u20134").first).to_be_visible()


def test_an_edit_is_sent_with_what_it_was_made_from(page, address):
    """Someone else edits while the form is open: it says so, keeps what was typed, and can be saved then."""
    opened(page, address, f"#/runs/{RUN}", RUN)
    dialog = edit_dialog(page)
    staleness = view_of(page, address)["recipe"]["limits"]["max_staleness"]
    expect(dialog.get_by_label("limits.max_staleness")).to_have_value(str(staleness))
    expect(dialog.get_by_label("priority")).to_have_count(0)
    expect(dialog.get_by_role("button", name="Save")).to_be_disabled()
    patch(page, address, RUN, limits__max_staleness=staleness + 2)
    dialog.get_by_label("learner.learning_rate").fill("")
    dialog.get_by_label("learner.learning_rate").press_sequentially("2.0e-6")
    dialog.get_by_role("button", name="Save 1").click()
    expect(dialog.get_by_role("alert")).to_contain_text(f"limits.max_staleness is {staleness + 2} now")
    assert float(dialog.get_by_label("learner.learning_rate").input_value()) == 2e-6
    assert violations(page) == []
    dialog.get_by_role("button", name="Save 1").click()
    expect(page.get_by_role("dialog")).to_have_count(0)
    recipe = view_of(page, address)["recipe"]
    assert (recipe["learner"]["learning_rate"], recipe["limits"]["max_staleness"]) == (2e-6, staleness + 2)
    opened(page, address, f"#/runs/{RUN}/settings", RUN)
    expect(page.get_by_text("learner.learning_rate: 0.001 → 0.000002")).to_be_visible()


def test_a_value_that_is_refused_is_named_at_its_field(page, address):
    opened(page, address, f"#/runs/{RUN}", RUN)
    dialog = edit_dialog(page)
    dialog.get_by_label("limits.max_inflight_groups").fill("-3")
    dialog.get_by_role("button", name="Save 1").click()
    expect(dialog.locator(".fault")).to_contain_text("limits.max_inflight_groups")
    assert dialog.get_by_label("limits.max_inflight_groups").get_attribute("aria-invalid") == "true"


def test_a_viewer_changes_nothing(page, address):
    page.goto(f"{address}/#token={VIEWER}")
    page.get_by_role("heading", name="Runs").wait_for()
    opened(page, address, f"#/runs/{RUN}", RUN)
    expect(page.get_by_role("group", name="Actions").get_by_role("button")).to_have_count(0)
    opened(page, address, "#/queue", "Queue")
    expect(page.get_by_role("link", name="browser-queued")).to_be_visible()
    expect(page.get_by_role("button", name="Priority")).to_have_count(0)


def test_the_queue_tells_why_and_changes_a_priority(page, address):
    opened(page, address, "#/queue", "Queue")
    row = page.get_by_role("row").filter(has_text="browser-queued")
    waits_for = next(
        run["waits_for"]
        for run in page.request.get(f"{address}/v1/queue", headers=HEADERS).json()["runs"]
        if run["id"] == "browser-queued"
    )
    expect(row).to_contain_text(waits_for)
    row.get_by_role("button", name="Priority").click()
    page.get_by_role("dialog").get_by_label("priority").fill("7")
    page.get_by_role("button", name="Save 1").click()
    expect(row).to_contain_text("7")
    assert view_of(page, address, "browser-queued")["priority"] == 7


def test_the_ledger_closes_to_the_token(page, address):
    opened(page, address, f"#/runs/{RUN}/ledger", RUN)
    expect(
        page.get_by_text("It closes to the token: each of the 1,000 generated tokens is in one row.")
    ).to_be_visible()
    tokens = "Tokens: trained 70.0 %, filtered 20.0 %, in flight 10.0 %"
    expect(page.get_by_role("img", name=tokens)).to_be_visible()
    told = "GPU time: trained 46.7 %, filtered 13.3 %, in flight 6.7 %, idle 33.3 %"
    expect(page.get_by_role("img", name=told)).to_be_visible()
    found = page.request.get(f"{address}/v1/runs/{RUN}/ledger", headers=HEADERS).json()
    assert len(found["rows"]) == len(page.get_by_role("row").all()) - 2  # the heading and the total
    expect(page.get_by_role("row").last).to_contain_text("1.50")
    opened(page, address, "#/projects", "Projects")
    expect(page.get_by_role("img", name="Time of default: trained")).to_be_visible()


def test_events_are_filtered(page, address):
    opened(page, address, f"#/runs/{RUN}/events", RUN)
    log = page.locator("ol.log li")
    page.get_by_label("What").select_option("service-ready")
    expect(log).to_have_count(1)
    expect(log).to_contain_text("rollout <b>not markup</b>")
    page.get_by_label("Text contains").fill("nowhere")
    expect(page.get_by_text("Nothing matches.")).to_be_visible()


def focused(page):
    return page.evaluate("document.activeElement?.outerHTML.slice(0, 200) ?? ''")


def test_a_dialog_keeps_the_focus_and_gives_it_back(page, address):
    opened(page, address, f"#/runs/{RUN}", RUN)
    page.get_by_role("button", name="Cancel").focus()
    page.keyboard.press("Enter")
    page.get_by_role("dialog").wait_for()
    assert "Keep it" in focused(page), "what does no harm comes first"
    for _ in range(6):
        page.keyboard.press("Tab")
        inside = "document.activeElement === document.body || !!document.activeElement.closest('dialog')"
        assert page.evaluate(inside), focused(page)
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    expect(page.get_by_role("button", name="Cancel")).to_be_focused()  # the page redraws after the browser hides it


VISITED = (
    ("#/runs", "Runs"),
    (f"#/runs/{RUN}", RUN),
    (f"#/runs/{RUN}/samples", RUN),
    (f"#/runs/{RUN}/ledger", RUN),
    (f"#/runs/{RUN}/events", RUN),
    (f"#/runs/{RUN}/settings", RUN),
    (f"#/runs/{RUN}/groups/{GROUP}", f"Group {GROUP}"),
    ("#/compare?runs=browser-running,browser-failed", "Compare runs"),
    ("#/queue", "Queue"),
    ("#/projects", "Projects"),
)
REACHABLE = "main :is(a[href], button:not(:disabled), input, select, textarea, summary, [tabindex='0'])"
MARKED = """() => {
    const here = document.activeElement, style = getComputedStyle(here);
    return here.matches(':focus-visible') && style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 2;
}"""


@each("view, heading", VISITED)
def test_tab_reaches_every_control_with_a_visible_mark(page, address, view, heading):
    """From the content on, as many presses as there are controls; each is seen to have the focus."""
    opened(page, address, view, heading)
    page.evaluate("document.getElementById('content').focus()")
    shown = f"[...document.querySelectorAll({json.dumps(REACHABLE)})].filter((one) => one.checkVisibility())"
    page.evaluate(f"{shown}.forEach((one, at) => one.dataset.stop = at)")
    wanted = page.evaluate(f"{shown}.length")
    reached = set()
    for _ in range(wanted + 3):
        page.keyboard.press("Tab")
        stop = page.evaluate("document.activeElement.dataset?.stop")
        if stop is not None:
            assert page.evaluate(MARKED), focused(page)
            reached.add(stop)
    missed = f"[...document.querySelectorAll({json.dumps(REACHABLE)})].filter((one) => one.dataset.stop !== undefined)"
    left = page.evaluate(f"{missed}.map((one) => [one.dataset.stop, one.outerHTML.slice(0, 200)])")
    assert [html for stop, html in left if stop not in reached] == []
    assert len(reached) == wanted > 0
