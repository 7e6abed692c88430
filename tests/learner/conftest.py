"""Owns the folder in which the learners of tests keep their runs.

Must not know the content of a run's folder.
"""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def runs_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for runs, an empty one for each test."""
    monkeypatch.setenv("PENSTOCK_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("PENSTOCK_HOST", "127.0.0.1")
    return tmp_path / "runs"
