"""What a user is typing stays, although the page reads and draws the run again every few seconds."""

from playwright.sync_api import expect

from tests.browser.visits import WAIT_MS


def drawn_again(page, path):
    """Wait until the page has read this path once more, and has drawn it."""
    with page.expect_response(lambda answer: answer.url.split("?")[0].endswith(path), timeout=WAIT_MS):
        pass
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def test_a_filter_that_is_being_typed_stays(page):
    name = page.get_by_label("Name contains")
    name.press_sequentially("fai")
    drawn_again(page, "/v1/runs")
    drawn_again(page, "/v1/runs")
    name.press_sequentially("led")
    expect(name).to_have_value("failed")
    expect(page.get_by_role("link", name="browser-failed")).to_be_visible()
    expect(page.get_by_role("link", name="browser-running")).to_have_count(0)


def test_the_number_of_replicas_that_is_being_typed_stays(page):
    page.get_by_role("link", name="browser-running").click()
    page.get_by_role("group", name="Actions").get_by_role("button", name="Scale", exact=True).click()
    replicas = page.get_by_label("Rollout replicas")
    expect(replicas).to_have_value("1")
    replicas.fill("7")
    drawn_again(page, "/v1/runs/browser-running")
    expect(replicas).to_have_value("7")


def test_a_setting_counts_as_it_is_typed(page):
    """Without leaving the field; and a number may pass through what is none, or what is another one."""
    page.get_by_role("link", name="New run").click()
    rate = page.locator("[id='field-learner.learning_rate']")
    rate.fill("")
    rate.press_sequentially("0.05e")
    expect(rate).to_have_value("0.05e")
    expect(page.get_by_text("learner.learning_rate: '0.05e' is not valid").first).to_be_visible()
    rate.press_sequentially("-3")
    expect(page.get_by_text("learner.learning_rate: ")).to_have_count(0)
    expect(rate).to_have_value("0.05e-3")
    rate.blur()
    expect(rate).to_have_value("0.00005")
