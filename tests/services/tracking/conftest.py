"""Owns the fixtures of the tests of trackers.

Must not stand in for a tracker's library.
"""

import pytest

from tests.services.tracking.following import TrackedRun


@pytest.fixture(autouse=True)
def runs(tmp_path, monkeypatch):
    """The runs folder, and a tracker that looks often."""
    monkeypatch.setenv("PENSTOCK_RUNS", str(tmp_path))
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_TOKEN", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("services.tracking.follower.POLL_S", 0.05)
    return tmp_path


@pytest.fixture
def submit(redis, redis_url, run_id):
    async def submitted(tracking):
        return await TrackedRun.submitted(redis, redis_url, run_id, tracking)

    return submitted
