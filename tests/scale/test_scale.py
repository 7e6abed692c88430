"""Every role comes back at the scale of the 32B recipe: 2,048 pending groups of 16 samples, 200 heartbeats."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scale.campaign import Comeback, Result, play
from tests.scale.scene import WORK


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_each_role_comes_back_within_30_seconds(tmp_path: Path) -> None:
    result = play(tmp_path)
    assert result.faults == [], f"\n{result}"


def test_late_roles_and_many_connections_are_faults() -> None:
    fine = [Comeback(role, 2048, 1.0, 2.0, 60) for role in WORK]
    assert Result(fine, 80).faults == []
    late = Comeback("sampler", 2048, None, None, 60, "its last words")
    idle = Comeback("learner", 2048, 3.0, None, 60)
    crowd = Comeback("verifier", 2048, 3.0, 4.0, 200)
    found = Result([late, idle, crowd], 200).faults
    assert [fault.split(":")[0] for fault in found] == [
        "the sampler was not ready within 30 s of its start",
        "the learner did no work within 30 s of its start",
        "200 connections while the verifier came back",
        "200 connections before the first kill",
        "the controller was not killed",
        "the rollout was not killed",
    ]
