"""Owns the tests of what the command line prints of a run: progress, curves, tables, and escaped text.

Must not call an API.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from deploy.cli.curves import PANELS, draw_curves, panels_of
from deploy.cli.progress import Follower, closing_table, duration, evaluation_line, seconds_left, step_line
from deploy.cli.terminal import cell, plain
from services.contracts import EvaluationRecord, PassAt


def step(number: int, finished: float, **metrics: float) -> dict[str, Any]:
    """A rollout step as the API returns it, with the fields that are printed."""
    return {"id": f"{number}-0", "step": number, "learning_finished_at": finished, "metrics": metrics}


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


def evaluated(name: str, **fields: Any) -> dict[str, Any]:
    """An evaluation as the API returns it."""
    record = EvaluationRecord(
        name=name,
        version=0,
        newest_version=0,
        prompts=64,
        samples_per_prompt=4,
        accuracy=0.195,
        standard_error=0.02,
        pass_at=(PassAt(k=1, value=0.195, standard_error=0.02), PassAt(k=4, value=0.5, standard_error=0.06)),
        majority=0.25,
        majority_standard_error=0.05,
        unknown=0,
    )
    return record.model_copy(update=fields).model_dump(mode="json")


def test_named_rewards_have_columns_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    follower = Follower(Console(width=300))
    view: dict[str, Any] = {
        "id": "r",
        "created_at": 1000.0,
        "rollout_steps_total": 9,
        "state": "running",
        "reason": "ready",
        "alerts": [],
        "events": [],
        "evaluations": [],
        "recipe": {"limits": {"response_tokens": None}},
    }
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
    view: dict[str, Any] = {
        "id": "r",
        "created_at": 1000.0,
        "rollout_steps_total": 2,
        "state": "running",
        "reason": "ready",
        "alerts": [],
        "events": [{"service": "rollout", "phase": "service-ready", "text": "engine up", "at": 1012.0}],
        "evaluations": [evaluated("before")],
        "recipe": {"limits": {"response_tokens": None}},
    }
    follower.take(view, [step(1, 100.0, accuracy=0.2)])
    follower.take(view, [])
    assert follower.cursor == "1-0"
    lines = capsys.readouterr().out.splitlines()
    assert "[   12s] rollout: service-ready: engine up" in lines
    expected = "held-out before: avg@4 0.195 ± 0.020, pass@4 0.500 ± 0.060, maj@4 0.250 ± 0.050 (version 0, 64 prompts)"
    assert lines.count(expected) == 1
    assert sum("service-ready" in line for line in lines) == 1
    assert sum(line.startswith("  1/2") for line in lines) == 1
    assert sum("run is running: ready" in line for line in lines) == 1


def test_follower_shows_the_reason_and_histogram_of_a_pause(capsys: pytest.CaptureFixture[str]) -> None:
    follower = Follower(Console())
    view: dict[str, Any] = {
        "id": "r",
        "created_at": 1000.0,
        "rollout_steps_total": 2,
        "evaluations": [],
        "events": [],
        "alerts": [],
        "recipe": {"limits": {"response_tokens": None}},
    }
    starved = "64 groups judged since the last batch, 0 of 4 kept: the run pauses; correct answers 0:60 4:4"
    for state, reason, alerts in (
        ("running", "ready", []),
        ("paused", "starved\x1b[2J", [starved]),
        ("paused", "starved\x1b[2J", [starved]),
        ("running", "resumed", []),
    ):
        follower.take(view | {"state": state, "reason": reason, "alerts": alerts}, [])
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
    console.print(closing_table({"id": "r", "evaluations": [evaluated("before"), evaluated("after", set="aime")]}))
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


def test_curves_are_a_png(tmp_path: Path) -> None:
    evaluations = [evaluated("before"), evaluated("after", version=2), evaluated("after", set="aime", version=2)]
    path = draw_curves("r", [step(1, 0.0, accuracy=0.2), step(2, 1.0, accuracy=0.3)], evaluations, tmp_path / "c.png")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_curves_have_a_panel_of_scores_where_they_say_more(tmp_path: Path) -> None:
    assert panels_of([step(1, 0.0, accuracy=0.2, score=0.2)]) == PANELS
    assert panels_of([step(1, 0.0, accuracy=0.2)]) == PANELS, "a step of an older release"
    [*_, (title, lines)] = panels_of([step(1, 0.0, accuracy=0.2, score=0.3)])
    assert (title, lines) == ("scores", (("score", "score"),))
    steps = [step(1, 0.0, accuracy=0.2, score=0.2, reward_has_a_box=0.5), step(2, 1.0, reward_style=0.5)]
    [*_, (_, lines)] = panels_of(steps)
    assert lines == (("score", "score"), ("reward_has_a_box", "has-a-box"), ("reward_style", "style"))
    assert draw_curves("r", steps, [], tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


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
