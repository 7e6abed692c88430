"""Owns how figures of a run are written: durations, scores with their errors, versions, times.

Must not lay anything out.
"""

from __future__ import annotations

import shlex
import time
from typing import TYPE_CHECKING

from penstock_client.cli.terminal import plain

if TYPE_CHECKING:
    from penstock_client.models import Evaluation, RolloutStep

SAME_SCORE = 1e-9


def duration(seconds: float) -> str:
    """Seconds as `4s`, `2m05s` or `1h03m`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def local_time(at: float, form: str = "%Y-%m-%d %H:%M:%S") -> str:
    """Unix seconds in this machine's time zone; `-` for what is no time."""
    try:
        return time.strftime(form, time.localtime(at))
    except (OverflowError, ValueError, OSError):  # a message may hold any number
        return "-"


def number(value: float | None, form: str) -> str:
    """A number in this format; `-` if there is none."""
    return "-" if value is None else form.format(value)


def score(value: float | None, error: float | None) -> str:
    """A score with its standard error; `-` if there is none."""
    return "-" if value is None else f"{value:.3f} ± {error or 0.0:.3f}"


def average(evaluation: Evaluation) -> str:
    """avg@k."""
    # Without a known verdict there is no score, although the record's accuracy is 0.
    known = evaluation.majority is not None
    return score(evaluation.accuracy, evaluation.standard_error) if known else "-"


def majority(evaluation: Evaluation) -> str:
    """maj@k."""
    return score(evaluation.majority, evaluation.majority_standard_error)


def versions(evaluation: Evaluation) -> str:
    """The policy versions that responded: `3`, or `3-5` if weights were synced during the evaluation."""
    oldest, newest = evaluation.version, evaluation.newest_version
    return str(oldest) if newest in (None, oldest) else f"{oldest}-{newest}"


def evaluation_line(evaluation: Evaluation) -> str:
    """One evaluation of one set in one line. Of pass@k only the largest k is shown: pass@1 equals avg@k."""
    k = evaluation.samples_per_prompt
    scores = [f"avg@{k} {average(evaluation)}"]
    if k > 1:
        scores += [f"pass@{rate.k} {score(rate.value, rate.standard_error)}" for rate in evaluation.pass_at[-1:]]
        scores.append(f"maj@{k} {majority(evaluation)}")
    scores += _scores(evaluation)
    notes = [f"version {versions(evaluation)}", f"{evaluation.prompts} prompts"]
    counts = (("unknown", evaluation.unknown), ("dropped", evaluation.dropped))
    notes += [f"{count} {name}" for name, count in counts if count]
    return f"{evaluation.set} {evaluation.name}: {', '.join(scores)} ({', '.join(notes)})"


def _scores(evaluation: Evaluation) -> list[str]:
    """The mean score where it is not the accuracy, and the mean of each named reward."""
    found = []
    if evaluation.score is not None and abs(evaluation.score - evaluation.accuracy) > SAME_SCORE:
        found.append(f"score {score(evaluation.score, evaluation.score_standard_error)}")
    return found + [f"{plain(name)} {value:.3f}" for name, value in sorted(evaluation.rewards.items())]


def seconds_left(steps: list[RolloutStep], total: int) -> float | None:
    """Time until the last rollout step at the mean pace so far; None before the second step."""
    if len(steps) < 2:
        return None
    pace = (steps[-1].learning_finished_at - steps[0].learning_finished_at) / (len(steps) - 1)
    return pace * max(0, total - steps[-1].step)


def hint(command: str, run: str) -> str:
    """A command about a run that can be copied to a shell, whatever its id."""
    return f"`penstock {command} {shlex.quote(run)}`"
