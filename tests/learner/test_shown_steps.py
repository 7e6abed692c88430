"""A learner that starts again shows the last step, and the windows over the run's history up to it."""

from types import SimpleNamespace
from typing import Any

from prometheus_client import REGISTRY

from learner.coordinator.run_start import RunStart
from services.metrics import forget
from tests.learner.checkpointing import records_of

RECORDS = [record.model_copy(update={"metrics": {"reward": float(step)}}) for step, record in records_of(30).items()]


def shown(run: str, family: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"penstock_{family}", {"run": run, **labels})


async def nothing(*_: Any) -> None:
    """No file is deleted."""


async def test_windows_continue_after_a_restart_or_a_rewind(run_id: str) -> None:
    worker: Any = SimpleNamespace(resume=SimpleNamespace(delete_after=nothing))
    publication: Any = SimpleNamespace(history=SimpleNamespace(fence=None), record=None)
    context: Any = SimpleNamespace(record=SimpleNamespace(id=run_id, recipe=None))
    start = RunStart(context, worker, publication)
    await start._sync_files(30, RECORDS)
    assert publication.record is RECORDS[-1]
    assert shown(run_id, "step_reward") == 30.0
    assert shown(run_id, "recent_reward", steps="10", statistic="mean") == 25.5
    assert shown(run_id, "recent_reward", steps="50", statistic="median") == 15.5
    await start._sync_files(12, RECORDS[:12])
    assert shown(run_id, "recent_reward", steps="10", statistic="mean") == 7.5
    assert shown(run_id, "recent_reward", steps="50", statistic="median") is None
    forget(run_id)
