"""One run from sign-in to deletion, in a real browser on a real stack: all that is clicked is checked with the API."""

import json
import re

import pytest
from playwright.sync_api import expect

from services.api.access.local_token import read_token, token_path
from tests.browser.visits import eventually, visit
from tests.harness.stack import Stack
from tests.harness.tiny_model import SPECIAL
from tests.harness.workload import write_questions
from tests.integration.runs import document

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray"), pytest.mark.timeout(900)]

RUN, STEPS = "from-the-page", 400
START_S, STEP_S, STOP_S = 240.0, 90.0, 60.0
STEPS_SHOWN = re.compile(r"^Accuracy over (\d+) rollout steps")
SAMPLE = re.compile(r"^(g\d+)·(\d+)$")
SPECIAL_TOKEN = re.compile("|".join(SPECIAL))


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """A stack of its own: this file's page deletes runs."""
    with Stack(tmp_path_factory.mktemp("page") / "runs") as stack:
        yield stack
    assert stack.left == [], stack.output


def shown_steps(page):
    """How many rollout steps the page's curve of the accuracy has."""
    labels = [chart.get_attribute("aria-label") or "" for chart in page.get_by_role("img").all()]
    return max((int(match[1]) for label in labels if (match := STEPS_SHOWN.match(label))), default=0)


def pressed(page, button, dialog=None):
    """Click a button among the run's actions; `dialog`: the button that confirms it."""
    page.get_by_role("group", name="Actions").get_by_role("button", name=button, exact=True).first.click()
    if dialog is not None:
        page.get_by_role("dialog").get_by_role("button", name=dialog, exact=True).click()


def state_shown(page, word, stack, deadline_s):
    """Wait until the page and the API give the run this state; the API's view."""
    expect(page.locator("h1 + .state")).to_contain_text(word, timeout=deadline_s * 1000)
    view = stack.view(RUN)
    assert view["state"] == word
    return view


def create(page, recipe, stack):
    """Fill in the form: the recipe as JSON, one value wrong in its field, then right; and start the run."""
    page.get_by_role("link", name="New run").click()
    page.get_by_label("as JSON").check()
    page.get_by_role("textbox", name="Recipe").fill(json.dumps(recipe))
    page.get_by_label("as JSON").uncheck()
    steps = page.get_by_label("rollout_steps", exact=True)
    steps.fill("-1")
    expect(page.get_by_text("limits.rollout_steps: -1 is not valid").first).to_be_visible()
    steps.fill(str(STEPS))
    expect(page.get_by_text("is not valid")).to_have_count(0)
    page.get_by_label("Run id (optional)").fill(RUN)
    page.get_by_role("button", name="Start the run").click()
    page.get_by_role("heading", name=RUN, exact=True).wait_for()
    view = stack.view(RUN)
    assert view["recipe"]["limits"]["rollout_steps"] == STEPS
    assert view["recipe"]["model"]["path"] == recipe["model"]["path"]


def watch(page, stack, more):
    """The curves move: the page's steps grow by `more`, up to those of the API, and never beyond."""
    first = shown_steps(page)
    eventually(page, lambda: shown_steps(page) >= first + more, f"{more} more steps", START_S if not first else STEP_S)
    known = len(stack.steps(RUN))
    eventually(page, lambda: shown_steps(page) >= known, f"the curve of all {known} steps", STEP_S)
    shown = shown_steps(page)
    assert shown <= len(stack.steps(RUN))


def look_at_a_group(page, stack):
    """Search trained samples, open one, and read its group's story: what the API tells of it is on the page."""

    def trained():
        return stack.api.get(f"/v1/runs/{RUN}/samples", params={"release": "trained"}).json()["samples"]

    eventually(page, lambda: bool(trained()), "a trained group in the archive", STEP_S)
    page.get_by_role("navigation", name="About this run").get_by_role("link", name="Samples").click()
    page.get_by_label("Fate").select_option("trained")
    page.get_by_role("button", name="Search").click()
    link = page.get_by_role("link", name=SAMPLE).first
    link.wait_for()
    group, index = SAMPLE.match(link.inner_text()).groups()
    link.click()
    page.get_by_role("heading", name=f"Group {group}", exact=True).wait_for()
    story = stack.api.get(f"/v1/runs/{RUN}/groups/{group}").raise_for_status().json()
    [attempt] = story["attempts"]
    sample = next(one for one in attempt["samples"] if one["index"] == int(index))
    assert attempt["release"] == "trained"
    assert sum(one["advantage"] for one in attempt["samples"]) == pytest.approx(0, abs=1e-4)
    expect(page.get_by_text(story["prompt"]["messages"][0]["content"], exact=True)).to_be_visible()
    expect(page.locator("summary").filter(has_text=re.compile(r"^Sample \d+"))).to_have_count(len(attempt["samples"]))
    opened = page.locator("details[open]").filter(has_text=f"Sample {index}:")
    expect(opened.locator("summary")).to_contain_text(sample["outcome"])
    expect(page.get_by_role("heading", name="Released: trained")).to_be_visible()
    expect(page.locator("dt", has_text="Published as version").locator("+ dd")).to_have_text(str(attempt["version"]))
    for colouring in ("advantage", "version", "logprob"):
        opened.get_by_label("Colour by").select_option(colouring)
    tokens = "".join(token["text"] for token in sample["tokens"])
    assert SPECIAL_TOKEN.sub("", tokens).startswith(sample["text"][:20]), "the text has no special tokens"
    return group


def pause_and_resume(page, stack):
    """No batch is added to a paused run, and a resumed one goes on from there."""
    pressed(page, "Pause")
    assert state_shown(page, "paused", stack, STOP_S)["pause_requested"]
    pressed(page, "Resume")
    assert not state_shown(page, "running", stack, STOP_S)["pause_requested"]


def scale(page, stack):
    """The dialog asks for two replicas; both become ready, on the page too."""
    page.get_by_role("group", name="Actions").get_by_role("button", name="Scale", exact=True).click()
    page.get_by_label("Rollout replicas").fill("2")
    page.get_by_role("dialog").get_by_role("button", name="Scale", exact=True).click()
    service = page.locator("section.service").filter(has=page.get_by_role("heading", name="rollout", exact=True))
    expect(service).to_contain_text("2 of 2 ready", timeout=START_S * 1000)
    view = stack.view(RUN)
    assert view["rollout_replicas"] == 2
    assert sum(one["service"] == "rollout" and one["state"] == "ready" for one in view["processes"]) == 2


def cancel(page, stack):
    """The run ends, and so do its processes."""
    pressed(page, "Cancel", "Cancel the run")
    state_shown(page, "cancelled", stack, STOP_S)
    eventually(page, lambda: not stack.view(RUN)["processes"], "the end of the processes' heartbeats", STOP_S)


def delete(page, stack):
    """The run leaves the list, the API and the folder."""
    pressed(page, "Delete")
    page.get_by_label("also its files").check()
    page.get_by_role("dialog").get_by_role("button", name="Delete", exact=True).click()
    page.get_by_role("heading", name="Runs", exact=True).wait_for()
    expect(page.get_by_role("link", name=RUN)).to_have_count(0, timeout=STOP_S * 1000)
    eventually(page, lambda: stack.api.get(f"/v1/runs/{RUN}").status_code == 404, "the record's end", STOP_S)
    assert not (stack.folder / RUN).exists()


def test_a_run_from_sign_in_to_deletion(running, browser, tiny_model, tmp_path, shots):
    recipe = document(tiny_model, write_questions(tmp_path / "questions.jsonl"), max_staleness=1, steps=2)
    address = f"http://127.0.0.1:{running.port}"
    with visit(browser, address) as page:

        def shot(name):
            page.screenshot(path=shots / f"{name}.png", full_page=True)

        page.goto(address)
        page.get_by_label("Token").fill(read_token(token_path(running.port)))
        page.get_by_role("button", name="Sign in").click()
        page.get_by_role("heading", name="Runs", exact=True).wait_for()
        create(page, recipe, running)
        shot("created")
        state_shown(page, "running", running, START_S)
        watch(page, running, more=1)
        watch(page, running, more=2)
        shot("curves")
        look_at_a_group(page, running)
        shot("group")
        page.goto(f"{address}/#/runs/{RUN}")
        pause_and_resume(page, running)
        watch(page, running, more=1)
        scale(page, running)
        shot("scaled")
        cancel(page, running)
        shot("cancelled")
        delete(page, running)
        shot("deleted")
