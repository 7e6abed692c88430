"""A stub stack survives faults like a real one, and a run of many steps leaves nothing behind but its records."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.chaos import results, soak, stub
from tests.chaos.faults import FAULTS
from tests.chaos.soak import Look, Soaked
from tests.harness.each import each

STEPS = 400


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_stub_run_survives_its_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("PENSTOCK_ROOTS")  # as `make chaos-stub` starts
    stub.play(tmp_path, seed=1, number=0, groups=960)
    found = results.read(tmp_path)
    wrong = results.shortcomings(found, wanted=10, engine_kills=0)
    assert wrong == [], f"\n{results.table(found)}"
    assert found.runs[0]["figures"]["trained"] >= 960


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_many_steps_leave_only_their_records(tmp_path: Path):
    soaked = soak.play(tmp_path, STEPS)
    assert soaked.faults == [], f"\n{soaked}"


def test_every_fault_of_the_deck_can_be_injected():
    offered = {need for shape in stub.SHAPES for need in shape.offers}
    assert {FAULTS[name].needs for name in stub.FAULTS} <= offered


def steady() -> Soaked:
    """A run of 1,000 steps that grows by its records alone."""
    looks = [
        Look(
            step=step,
            cpu_s=0.05 * step,
            bytes={"group": 400_000, "payload": 90_000, "steps": 800 * step},
            keys={"group": 520, "payload": 120, "steps": 1},
            files={"batches": 40, "checkpoints": 6, "records": step},
            server_bytes=9 << 20,
        )
        for step in range(25, 1000, 25)
    ]
    return Soaked(1000, "succeeded", list(range(1, 1001)), True, looks)


def grown(step: int, **changes: object) -> Soaked:
    """The run, with another look from `step` on: numbers per step beyond it are added to the named part."""
    soaked = steady()

    def changed(look: Look) -> Look:
        beyond = max(0, look.step - step)
        values = {}
        for name, (part, per_step) in changes.items():
            values[name] = (
                look.cpu_s + per_step * beyond
                if name == "cpu_s"
                else {**getattr(look, name), part: getattr(look, name).get(part, 0) + per_step * beyond}
            )
        return replace(look, **values)

    return replace(soaked, looks=[changed(look) for look in soaked.looks])


def test_a_run_that_grows_by_its_records_is_fine():
    assert steady().faults == []


@each(
    "start, soaked",
    [
        ("bytes grew", grown(0, bytes=("payload", 1000))),
        ("bytes grew", grown(0, bytes=("unknown", 1000))),
        ("keys grew", grown(0, keys=("payload", 1))),
        ("files grew", grown(0, files=("batches", 1))),
        ("each step left", grown(0, bytes=("steps", 3000))),
        ("1950 records", grown(0, files=("records", 1))),
        ("CPU per step grew", grown(500, cpu_s=("", 0.05))),
        ("the run succeeded after", replace(steady(), committed=[1, *range(1, 1000)])),
        ("the run failed", replace(steady(), state="failed")),
        ("its counters", replace(steady(), reconciled=False)),
        ("too few steps", replace(steady(), looks=[])),
    ],
)
def test_each_growth_is_a_fault(start: str, soaked: Soaked):
    assert len(soaked.faults) == 1, soaked.faults
    assert soaked.faults[0].startswith(start)
