"""Owns the campaign's results: a file of JSON lines that survives interruptions, and the table made from it.

Must not run anything.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.episode import Played
from tests.chaos.faults import FAULTS

FILE = "results.jsonl"
SUCCEEDED = "succeeded"
HEAD = ("fault", "count", "recovered", "p50 s", "p95 s", "lost", "duplicated")


@dataclass
class Results:
    """The results so far. They leave out faults of a run that was not judged: those are injected again."""

    runs: list[dict[str, Any]] = field(default_factory=list)
    faults: list[dict[str, Any]] = field(default_factory=list)

    @property
    def counted(self) -> Counter[str]:
        """How often each fault has counted."""
        return Counter(fault["fault"] for fault in self.faults if fault["counted"])

    @property
    def engine_kills(self) -> int:
        """The number of engines killed."""
        return sum(count for name, count in self.counted.items() if name in FAULTS and FAULTS[name].engine)


def read(folder: Path) -> Results:
    """The results in a folder; empty without a file."""
    path = folder / FILE
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    by_kind = {kind: [line for line in lines if line["kind"] == kind] for kind in ("run", "fault")}
    judged = {line["run"] for line in by_kind["run"]}
    return Results(by_kind["run"], [line for line in by_kind["fault"] if line["run"] in judged])


def add(folder: Path, played: Played) -> None:
    """Append a run and its faults; the run's line is written last, and only then do its faults count."""
    lines = [*(outcome.as_json() for outcome in played.outcomes), played.as_json()]
    _append(folder, lines)


def add_broken(folder: Path, run: str, reason: str) -> None:
    """Append a run that could not be judged, because its stack failed or it never started."""
    _append(
        folder,
        [
            {
                "kind": "run",
                "run": run,
                "state": "broken",
                "reason": reason,
                "seconds": 0.0,
                "lost": 0,
                "duplicated": 0,
                "findings": [],
                "figures": {},
            }
        ],
    )


def _append(folder: Path, lines: Iterable[dict[str, Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / FILE).open("a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines))


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that is not exceeded by at least `share` of `values`; NaN without values."""
    ranked = sorted(values)
    return ranked[max(0, math.ceil(share * len(ranked)) - 1)] if ranked else math.nan


def rows(results: Results) -> list[tuple[str, ...]]:
    """The table's rows. A lost or duplicated group counts against every fault of its run."""
    by_run = {run["run"]: run for run in results.runs}
    table = []
    for name in FAULTS:
        mine = [fault for fault in results.faults if fault["fault"] == name and fault["counted"]]
        if mine:
            table.append(_row(name, mine, [by_run[run] for run in {fault["run"] for fault in mine}]))
    total = [fault for fault in results.faults if fault["counted"]]
    return [*table, _row("all", total, results.runs)]


def _row(name: str, faults: list[dict[str, Any]], runs: list[dict[str, Any]]) -> tuple[str, ...]:
    seconds = [fault["seconds"] for fault in faults if fault["seconds"] is not None]
    times = [f"{percentile(seconds, share):.1f}" for share in (0.5, 0.95)]
    sums = [str(sum(run[what] for run in runs)) for what in ("lost", "duplicated")]
    return (name, str(len(faults)), str(len(seconds)), *times, *sums)


def table(results: Results) -> str:
    """The table as text."""
    lines = [HEAD, *rows(results)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEAD))]
    return "\n".join(
        " | ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def shortcomings(results: Results, wanted: int, engine_kills: int, each: Iterable[str] = ()) -> list[str]:
    """Why the campaign does not pass; empty if it does. `each`: the faults that have to count at least once."""
    found = []
    counted = sum(results.counted.values())
    if counted < wanted:
        found.append(f"{counted} faults counted: expected {wanted}")
    if results.engine_kills < engine_kills:
        found.append(f"{results.engine_kills} engines were killed: expected {engine_kills}")
    found += [f"{name!r} never counted" for name in each if not results.counted[name]]
    hurt = [fault for fault in results.faults if fault["counted"] and fault["seconds"] is None]
    found += [f"{fault['run']}: no recovery from {fault['fault']!r}" for fault in hurt]
    for run in results.runs:
        if run["state"] != SUCCEEDED:
            found.append(f"{run['run']} {run['state']}: {run['reason'].splitlines()[0] if run['reason'] else ''}")
        found += [f"{run['run']}: {finding}" for finding in run["findings"][:10]]
    return found
