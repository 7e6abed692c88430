"""The benchmark of weight publications, tiny: each replica holds what was published, and the report has every part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.weights import bench
from benchmarks.weights.pause import Interruption
from benchmarks.weights.transfer import Publication

PUBLICATION = Publication(
    size=1000,
    publish_s=2.0,
    snapshot_s=0.5,
    form_s=0.25,
    broadcast_s=0.5,
    staging_s=0.75,
    checksum_s=0.125,
    apply_s=1.0,
    raw_per_s=500.0,
)
INTERRUPTION = Interruption(
    publish_s=2.0, staging_s=1.0, pause_s=0.5, asked=1280, lost=0, versions=2, longest_gap_s=0.75, usual_gap_s=0.05
)


def test_a_publication_is_compared_with_raw_gloo() -> None:
    assert (PUBLICATION.received, PUBLICATION.held, PUBLICATION.rest_s) == (2.0, 1.0, 0.25)


def test_a_fleet_s_memory_is_that_of_its_copies() -> None:
    assert bench.needed(10, 1) == 50
    assert bench.needed(10, 4) == 110


def test_lost_tokens_miss_their_target() -> None:
    lost = Interruption(**{**vars(INTERRUPTION), "lost": 3})
    assert [each.name for each in bench.interruptions_of([INTERRUPTION, lost, lost]) if each.missed] == [
        "vLLM: tokens lost"
    ]


def test_two_replicas_hold_what_was_published(tmp_path: Path, capsys: Any) -> None:
    """`measure` compares the parameters of each replica with the learner's."""
    sizes = ["--models", "tiny", "--replicas", "2", "--raw-mib", "1", "--bucket-mib", "1", "--repeats", "2"]
    bench.main(["--parts", "transfer", *sizes, "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    document = json.loads((tmp_path / "weights.json").read_text())
    names = [figure["name"] for figure in document["figures"]]
    assert "tiny, 2 replicas: received / raw Gloo" in names
    assert "| tiny, 2 | " in printed
    [part] = document["details"]["publications"]
    assert (part["replicas"], len(part["steady"])) == (2, 2)
    assert part["first"]["form_s"] > 0 == part["steady"][0]["form_s"]
    assert (tmp_path / "weights.png").stat().st_size > 0


def test_too_little_memory_ends_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "needed", lambda size, replicas: 1 << 60)
    with pytest.raises(SystemExit, match="tiny, 1 replicas: "):
        bench.main(["--parts", "transfer", "--models", "tiny", "--replicas", "1", "--out", str(tmp_path)])


@pytest.mark.slow
@pytest.mark.xdist_group("vllm")
@pytest.mark.timeout(900)
def test_requests_of_an_engine_lose_no_token(tmp_path: Path) -> None:
    bench.main(["--parts", "pause", "--pause-model", "tiny", "--repeats", "1", "--out", str(tmp_path)])
    [found] = json.loads((tmp_path / "weights.json").read_text())["details"]["interruptions"]
    assert (found["lost"], found["asked"]) == (0, 8 * 160)
    assert found["versions"] == 2, "the sync was amid the requests"
    assert found["longest_gap_s"] >= found["pause_s"] / 2
