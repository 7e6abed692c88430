"""The benchmarks that start a stack, each with a tiny model: they measure a run from its start to its end.

Slow: each starts `penstock up` once or twice.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from benchmarks.loop.measured_run import measure
from benchmarks.loop.overlap import input_tokens, stale_share, with_inputs
from benchmarks.loop.start_up import bench
from benchmarks.loop.start_up.bench import EMPTY, THERE
from learner.archive import RunArchive
from tests.harness.small_run import recipe_document
from tests.harness.tiny_model import write_tiny_model

ON_TWO_CORES: dict[str, Any] = {
    "rollout": {"cpus": 0.3},
    "learner": {"cpus": 0.3},
    "verifier": {"cpus": 0.1},
    # A random model answers nothing: without filtering it trains all the same.
    "algorithm": {"dynamic_sampling": {"enabled": False}},
}
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray"), pytest.mark.timeout(900)]


def test_a_run_is_measured_from_its_start_to_its_end(tmp_path: Path) -> None:
    document = recipe_document(write_tiny_model(tmp_path / "model"), **ON_TWO_CORES)
    run = measure(document, tmp_path / "runs", deadline_s=400.0)
    wanted = document["limits"]["rollout_steps"]
    assert [step.step for step in run.steps] == [*range(1, wanted + 1)]
    moments = (run.started, run.ready, run.submitted, run.first_dispatch, run.last_update, run.ended)
    assert moments == tuple(sorted(moments))
    assert {"engine", "learner", "redis", "sampler", "verifier"} <= set(run.cpu.between(run.started, run.ended))
    assert run.cpu_s(run.started, run.ended) <= len(psutil.Process().cpu_affinity()) * (run.ended - run.started)
    assert run.tokens["trained"] > 0
    assert 0.0 <= stale_share(run.tokens) < 1.0
    archive = RunArchive(run.folder)
    first, *_ = with_inputs(run, archive).steps
    assert first.metrics["input_tokens"] == input_tokens(archive.batch(1, archive.trained()[1]))


def test_both_starts_are_measured(tmp_path: Path) -> None:
    least = {"limits": {"rollout_steps": 1}, "data": {"held_out": 1}, "evaluation": {"samples": 1}}
    document = recipe_document(write_tiny_model(tmp_path / "model"), **ON_TWO_CORES, **least)
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(document))
    assert bench.main(["--repeats", "1", "--recipe", str(tmp_path / "tiny.yaml"), "--out", str(tmp_path)]) == 0
    written = json.loads((tmp_path / "start-up.json").read_text())
    found = {figure["name"]: figure["values"] for figure in written["figures"]}
    for case in (EMPTY, THERE):
        [first] = found[f"{case}: `penstock up` until the first response"]
        [update] = found[f"{case}: `penstock up` until the first update"]
        [share] = found[f"{case}: the engine's share of the way to the first response"]
        assert 0.0 < first < update
        assert 0.0 < share < 1.0
    assert (tmp_path / "start-up.png").stat().st_size > 0
