"""A trainer that goes on from a checkpoint does what the one that wrote it did, bit by bit, at every ZeRO stage."""

from __future__ import annotations

from pathlib import Path

import pytest

from learner.ranks import Ranks
from learner.trainer import Trainer, leave
from services.contracts import OptimizerStepRecord
from services.settings import parse_recipe
from services.streams.keys import RunKeys
from tests.conftest import recipe_document
from tests.learner.running import draw_batch, end_ranks, start_programs

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:(torch|deepspeed)"),
    pytest.mark.filterwarnings("ignore::FutureWarning:(torch|deepspeed)"),
]
STAGES = (0, 1, 2, 3)


def trainer(model: Path, stage: int, dtype: str, ranks: Ranks) -> Trainer:
    # The rate of a warming-up schedule tells whether its counter was restored, weight decay whether the weights were.
    learner = {"zero_stage": stage, "dtype": dtype, "warmup_rollout_steps": 4, "weight_decay": 0.1}
    return Trainer(model, parse_recipe(recipe_document(model, learner=learner)), ranks)


def train(one: Trainer, version: int, rank: int) -> tuple[OptimizerStepRecord, ...]:
    batch, payloads = draw_batch(RunKeys("run"), version)
    plans = one.plan(batch)
    own = {sample.payload for plan in plans for sample in plan.shares[rank]}
    return one.train(plans, {key: payloads[key] for key in own}).optimizer


def check_continuation(model: Path, folder: Path, stage: int, dtype: str, ranks: Ranks) -> None:
    """Two steps, a checkpoint, two steps; then the last two again from the checkpoint, and all without one."""
    writer = trainer(model, stage, dtype, ranks)
    before = [train(writer, version, ranks.rank) for version in (0, 1)]
    writer.save(folder, "engine")
    after = [train(writer, version, ranks.rank) for version in (2, 3)]
    writer.close()
    reader = trainer(model, stage, dtype, ranks)
    reader.load(folder, "engine")
    assert [train(reader, version, ranks.rank) for version in (2, 3)] == after
    reader.close()
    undisturbed = trainer(model, stage, dtype, ranks)
    assert [train(undisturbed, version, ranks.rank) for version in range(4)] == before + after
    undisturbed.close()
    assert len({one.gradient_norm for part in before + after for one in part}) == 8


@pytest.mark.parametrize(("stage", "dtype"), [*((stage, "float32") for stage in STAGES), (2, "bfloat16")])
def test_one_rank_goes_on_from_a_checkpoint(tiny_model: Path, tmp_path: Path, stage: int, dtype: str) -> None:
    ranks = Ranks(0, 1, "127.0.0.1", 0, timeout_s=60)
    try:
        check_continuation(tiny_model, tmp_path, stage, dtype, ranks)
    finally:
        leave(ranks)


def test_two_ranks_go_on_from_a_checkpoint(tiny_model: Path, tmp_path: Path) -> None:
    code = (
        "from tests.learner.test_checkpoints import main; "
        f"main({str(tiny_model)!r}, {str(tmp_path)!r}, {{rank}}, {{world}}, {{port}})"
    )
    processes = start_programs(code, 2)
    try:
        errors = [process.communicate(timeout=200)[1] for process in processes]
    finally:
        end_ranks(processes)
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors)
    # Each rank wrote its part of the optimizer's state.
    names = [path.name for path in (tmp_path / "2/engine").glob("*optim_states.pt")]
    assert sorted(name.split("_mp_")[0] for name in names) == ["zero_pp_rank_0", "zero_pp_rank_1"]


def main(model: str, folder: str, rank: int, world: int, port: int) -> None:
    """One rank of several, at every stage."""
    ranks = Ranks(rank, world, "127.0.0.1", port, timeout_s=100)
    for stage in STAGES:
        check_continuation(Path(model), Path(folder) / str(stage), stage, "float32", ranks)
    leave(ranks)


def test_a_checkpoint_that_is_not_there_is_named(tiny_model: Path, tmp_path: Path) -> None:
    ranks = Ranks(0, 1, "127.0.0.1", 0, timeout_s=60)
    one = trainer(tiny_model, 1, "float32", ranks)
    try:
        with pytest.raises(FileNotFoundError, match="engine"):
            one.load(tmp_path, "engine")
    finally:
        one.close()
        leave(ranks)
