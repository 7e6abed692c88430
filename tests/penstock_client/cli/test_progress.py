"""Owns the tests of what is printed of a run: progress, live view, tables, and escaped text.

Must not call an API.
"""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from penstock_client.cli.following.figures import duration, evaluation_line, hint, seconds_left
from penstock_client.cli.following.live import BARS, draw_run, sparkline
from penstock_client.cli.following.progress import Follower, step_line
from penstock_client.cli.following.tables import closing_table, summary_rows
from penstock_client.cli.terminal import cell, plain, print_table
from penstock_client.models import reward_metric, reward_names
from services import contracts
from tests.penstock_client.cli.viewing import evaluated, happened, step, viewed


def test_time_left_is_the_mean_pace_times_the_steps_left() -> None:
    steps = [step(1, 100.0), step(2, 110.0), step(3, 130.0)]
    assert seconds_left(steps[:1], 12) is None
    assert seconds_left(steps, 12) == pytest.approx(15.0 * 9)
    assert [duration(seconds) for seconds in (3.6, 125, 3780)] == ["4s", "2m05s", "1h03m"]


def test_step_line_shows_metrics_and_dashes_for_missing_ones() -> None:
    line = step_line(
        step(
            3,
            0.0,
            accuracy=0.314,
            reward=-0.372,
            response_length=5.25,
            groups_kept=8,
            groups_filtered=3,
            staleness_mean=0.5,
            staleness_max=1,
        ),
        12,
        125.0,
    )
    assert line.split() == ["3/12", "0.31", "-0.37", "-", "-", "5.2", "8/3/-", "0.50/1", "-", "2m05s"]
    assert step_line(step(3, 0.0), None, None).split()[:2] == ["3", "-"], "with a token budget the last step is unknown"


def test_named_rewards_have_columns_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    follower = Follower(Console(width=300))
    view = viewed(rollout_steps_total=9)
    follower.take(view, [step(1, 1.0, accuracy=0.2)])
    rewards = {"reward_style": 0.5, "reward_answer_in_a_box": 0.25}
    follower.take(view, [step(2, 2.0, accuracy=0.2, **rewards), step(3, 3.0, **rewards)])
    lines = capsys.readouterr().out.splitlines()
    headings = [line for line in lines if line.split()[0] == "step"]
    assert [line.split()[-2:] for line in headings] == [["tokens/s", "left"], ["answer-in-a-box", "style"]]
    third = next(line for line in lines if line.split()[0] == "3/9")
    assert third.split()[-2:] == ["0.25", "0.50"]
    assert len(third) == len(headings[1]), "the columns are aligned"


def test_evaluation_line_shows_scores_that_say_more() -> None:
    same = evaluated("before", score=0.195, score_standard_error=0.02)
    assert evaluation_line(same) == evaluation_line(evaluated("before"))
    partial = evaluated("before", score=0.4, score_standard_error=0.01, rewards={"style": 0.5, "answer": 0.25})
    expected = "maj@4 0.250 ± 0.050, score 0.400 ± 0.010, answer 0.250, style 0.500 (version 0, 64 prompts)"
    assert evaluation_line(partial).endswith(expected)


def test_follower_prints_everything_once(capsys: pytest.CaptureFixture[str]) -> None:
    follower = Follower(Console())
    view = viewed(events=[happened("service-ready", "engine up", 1012.0)], evaluations=[evaluated("before")])
    follower.take(view, [step(1, 100.0, accuracy=0.2)])
    follower.take(view, [])
    assert follower.steps[-1].id == "1-0"
    lines = capsys.readouterr().out.splitlines()
    assert "[   12s] rollout: service-ready: engine up" in lines
    expected = "held-out before: avg@4 0.195 ± 0.020, pass@4 0.500 ± 0.060, maj@4 0.250 ± 0.050 (version 0, 64 prompts)"
    assert lines.count(expected) == 1
    assert sum("service-ready" in line for line in lines) == 1
    assert sum(line.startswith("  1/2") for line in lines) == 1
    assert sum("run is running: ready" in line for line in lines) == 1


def test_follower_shows_the_reason_and_histogram_of_a_pause(capsys: pytest.CaptureFixture[str]) -> None:
    follower = Follower(Console())
    starved = "64 groups judged since the last batch, 0 of 4 kept: the run pauses; correct answers 0:60 4:4"
    for state, reason, alerts in (
        ("running", "ready", []),
        ("paused", "starved\x1b[2J", [starved]),
        ("paused", "starved\x1b[2J", [starved]),
        ("running", "resumed", []),
    ):
        follower.take(viewed(state=state, reason=reason, alerts=alerts), [])
    lines = [line.split("] ", 1)[1] for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "run is running: ready",
        "run is paused: starved\\x1b[2J",
        starved,
        "`penstock resume r` resumes it",
        "run is running: resumed",
    ]


def test_evaluation_line_shows_version_range_and_gaps() -> None:
    line = evaluation_line(evaluated("step-5", set="aime", version=5, newest_version=7, unknown=3, dropped=1))
    assert line.endswith("(version 5-7, 64 prompts, 3 unknown, 1 dropped)")
    nothing = evaluated("after", prompts=0, accuracy=0.0, pass_at=(), majority=None, majority_standard_error=None)
    assert evaluation_line(nothing) == "held-out after: avg@4 -, maj@4 - (version 0, 0 prompts)"


def test_closing_table_has_a_row_per_evaluation() -> None:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(closing_table(viewed(evaluations=[evaluated("before"), evaluated("after", set="aime")])))
    _, heading, aime, held_out = [
        line for line in console.export_text().splitlines() if "─" not in line and "━" not in line
    ]
    assert [cell.strip() for cell in heading.split("┃")[1:-1]] == [
        "set",
        "evaluation",
        "policy version",
        "prompts",
        "k",
        "avg@k",
        "pass@4",
        "maj@k",
    ]
    cells = ["0", "64", "4", "0.195 ± 0.020", "0.500 ± 0.060", "0.250 ± 0.050"]
    assert [cell.strip() for cell in aime.split("│")[1:-1]] == ["aime", "after", *cells]
    assert [cell.strip() for cell in held_out.split("│")[1:-1]] == ["held-out", "before", *cells]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain ünï 漢字 🙂", "plain ünï 漢字 🙂"),
        ("\x1b[31mred\x1b[0m", "\\x1b[31mred\\x1b[0m"),
        ("\x9b2J\x00\x7f\a\b\r\n\t", "\\x9b2J\\x00\\x7f\\x07\\x08\\r\\n\\t"),
        ("a\u202eb\u2066c\u200bd\u2028e\ufeff", "a\\u202eb\\u2066c\\u200bd\\u2028e\\ufeff"),
        ("\ud800\U000e0041", "\\ud800\\U000e0041"),
    ],
)
def test_control_characters_are_printed_as_escapes(text: str, shown: str) -> None:
    assert plain(text) == shown
    console = Console(width=200, record=True, file=io.StringIO(), force_terminal=True)
    console.print(cell(f"[bold]{text}[/bold] :smile:"))
    assert console.export_text().rstrip("\n") == f"[bold]{shown}[/bold] :smile:"


def test_long_waits_of_a_start_up_are_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    follower = Follower(Console(width=300))
    waiting = happened("waiting", "waits for a batch for 46 s of at most 600 s", 1046.0, "learner")
    stalled = happened("stalled", "waits for a batch for 601 s of at most 600 s", 1601.0, "learner")
    follower.take(viewed(events=[waiting]), [])
    follower.take(viewed(events=[waiting, stalled]), [])
    later = happened("waiting", "waits for a verdict", 1700.0, "sampler")
    follower.take(viewed(events=[waiting, stalled]), [step(1, 1650.0)])
    follower.take(viewed(events=[waiting, stalled, later]), [])
    lines = [line for line in capsys.readouterr().out.splitlines() if "waits" in line]
    assert [line.split("] ")[1].split(":")[:2] for line in lines] == [["learner", " stalled"], ["sampler", " waiting"]]


def test_sparkline_keeps_its_shape_at_any_length() -> None:
    assert sparkline([]) == ""
    assert sparkline([0.5] * 3) == BARS[4] * 3
    rising = sparkline(list(range(1000)), points=8)
    assert rising == BARS
    assert sparkline([0.0, 1.0]) == BARS[0] + BARS[-1]


def test_the_live_view_fits_80_columns() -> None:
    waits = [{"name": "batch", "waits_for": "a batch \x1b[2J", "since": 1900.0, "deadline_s": 600.0}]
    process = {"id": "learner-1", "service": "learner", "state": "running", "waits": waits}
    view = viewed(
        processes=[process, {"id": "r-1", "service": "rollout", "state": "ready"}],
        events=[happened("ready", "engine up " * 30, 1012.0)],
        alerts=["[bold]starved[/bold]"],
        evaluations=[evaluated("before")],
        rollout_steps=3,
        rollout_steps_total=9,
    )
    steps = [step(number, 1000.0 + number, accuracy=number / 10, reward_style=0.5) for number in (1, 2, 3)]
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(draw_run(view, steps, 2000.0))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80
    for part in ("running", "step 3 of 9", "0.100  0.300", "style", "learner", "1 running", "1m40s", "before"):
        assert part in text.replace("   ", "  "), text
    assert "waits for a batch \\x1b[2J, for 1m40s of at most 10m00s" in text
    assert "[bold]starved[/bold]" in text


def test_the_summary_is_plain_text() -> None:
    rows = dict(summary_rows(viewed(reason="\x1b[2J", groups={"dispatched": 3, "trained": 2, "pending": 1})))
    assert rows["state"] == "running: \\x1b[2J"
    assert rows["groups"] == "3 dispatched: 2 trained, 0 filtered, 0 stale, 0 dead, 1 pending"


def test_a_piped_table_has_one_line_per_row(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["run", "n", "reason"], [["r-1", "5", "x" * 500 + "\n"], ["r-22", "10", ""]], right=["n"])
    assert capsys.readouterr().out.splitlines() == [
        "run    n  reason",
        f"r-1    5  {'x' * 500}\\n",
        "r-22  10",
    ]


def test_hints_can_be_copied() -> None:
    assert hint("resume", "a-b") == "`penstock resume a-b`"
    assert hint("show", "a b; rm") == "`penstock show 'a b; rm'`"


def test_metrics_of_rewards_are_named_as_the_learner_does() -> None:
    names = ["answer-in-a-box", "style"]
    metrics = {contracts.reward_metric(name): 0.5 for name in names} | {"reward": 0.1}
    assert [reward_metric(name) for name in names] == [contracts.reward_metric(name) for name in names]
    assert reward_names(metrics) == contracts.reward_names(metrics) == names
