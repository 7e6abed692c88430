"""Any number of ranks at any ZeRO stage restores a trainer's state bit by bit, and continues as if uninterrupted."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file

from learner.archive import ArchiveError
from learner.training.process_group import Ranks
from learner.training.trainer import Trainer, leave
from services.contracts import OptimizerStepRecord
from services.settings.engines.arguments import DEEPSPEED
from tests.harness.tiny_model import write_tiny_model
from tests.learner.checkpointing import (
    bits,
    files_of,
    open_trainer,
    parameters_of,
    tensors_of,
    train,
    write_state,
)
from tests.learner.running import end_ranks, start_programs

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:(torch|deepspeed)"),
    pytest.mark.filterwarnings("ignore::FutureWarning:(torch|deepspeed)"),
]
STAGES = (0, 1, 2, 3)
NEXT = "next.json"
"""The result of the writer's next rollout step: [loss, norm] of its two optimizer steps."""


@pytest.fixture
def alone() -> Ranks:
    """The only rank; it leaves its group after the test."""
    ranks = Ranks(0, 1, "127.0.0.1", 0, timeout_s=60)
    yield ranks
    leave(ranks)


def check_continuation(model: Path, folder: Path, stage: int, dtype: str, ranks: Ranks, **algorithm: str) -> None:
    """Two steps, a state on disk, two steps; then the last two again from the disk, and all four without it."""
    writer = open_trainer(model, stage, dtype, ranks, **algorithm)
    before = [train(writer, version, ranks.rank) for version in (0, 1)]
    write_state(writer.capture(), folder, ranks.rank)
    after = [train(writer, version, ranks.rank) for version in (2, 3)]
    ended = parameters_of(writer)
    writer.close()
    ranks.all_reduce(torch.zeros(1))  # all files are written
    reader = open_trainer(model, stage, dtype, ranks, **algorithm)
    reader.restore(files_of(folder))
    assert [train(reader, version, ranks.rank) for version in (2, 3)] == after
    assert all(torch.equal(bits(tensor), bits(ended[name])) for name, tensor in parameters_of(reader).items())
    reader.close()
    undisturbed = open_trainer(model, stage, dtype, ranks, **algorithm)
    assert [train(undisturbed, version, ranks.rank) for version in range(4)] == before + after
    undisturbed.close()
    assert len({record.gradient_norm for part in before + after for record in part}) == 8


@pytest.mark.parametrize(
    ("stage", "dtype"),
    [
        *((stage, dtype) for stage in (0, 1, 2) for dtype in ("float32", "bfloat16")),
        *[(0, "float64"), (3, "bfloat16"), pytest.param(3, "float32", marks=pytest.mark.slow)],
    ],
)
def test_one_rank_continues_as_if_it_had_not_stopped(
    tiny_model: Path, tmp_path: Path, alone: Ranks, stage: int, dtype: str
) -> None:
    check_continuation(tiny_model, tmp_path, stage, dtype, alone)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "dtype"),
    [
        (0, "float64"),
        (1, "bfloat16"),
        (2, "float32"),
        (3, "bfloat16"),
        pytest.param(0, "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_a_value_head_continues_too(tiny_model: Path, tmp_path: Path, alone: Ranks, stage: int, dtype: str) -> None:
    check_continuation(tiny_model, tmp_path, stage, dtype, alone, preset="ppo")
    kept = tensors_of(tmp_path)
    assert all(float(kept[f"{kind}.value_head.weight"].abs().max()) > 0 for kind in ("master", "exp_avg", "exp_avg_sq"))


@pytest.mark.parametrize("stage", STAGES)
def test_the_state_of_an_untrained_policy_is_saved_too(
    tiny_model: Path, tmp_path: Path, alone: Ranks, stage: int
) -> None:
    writer = open_trainer(tiny_model, stage, "float32", alone)
    write_state(writer.capture(), tmp_path, 0)
    wanted = [train(writer, version, 0) for version in (0, 1)]
    writer.close()
    kept = tensors_of(tmp_path)
    assert all(float(tensor.abs().max()) == 0 for name, tensor in kept.items() if name.startswith(("exp_avg", "step")))
    reader = open_trainer(tiny_model, stage, "float32", alone)
    train(reader, 5, 0)  # must have no effect after the restore
    reader.restore(files_of(tmp_path))
    assert [train(reader, version, 0) for version in (0, 1)] == wanted
    reader.close()


def leave_states(model: Path, folder: Path, stages: Sequence[int], ranks: Ranks) -> None:
    """Write a state per stage after two rollout steps, and the result of the third."""
    for stage in stages:
        writer = open_trainer(model, stage, "float32", ranks)
        for version in (0, 1):
            train(writer, version, ranks.rank)
        writer.non_finite_in_a_row = 2
        source = folder / f"{ranks.world}-ranks-stage-{stage}"
        write_state(writer.capture(), source, ranks.rank)
        record = train(writer, 2, ranks.rank)
        if ranks.rank == 0:
            (source / NEXT).write_text(json.dumps([(step.loss, step.gradient_norm) for step in record]))
        writer.close()


def check_reading(model: Path, folder: Path, stage: int, alike: int, ranks: Ranks) -> int:
    """Restore every state of `folder`: the same bits are captured, and that of stage `alike` trains the same.

    Returns how many there are.
    """
    reader = open_trainer(model, stage, "float32", ranks)
    sources = sorted(folder.iterdir())
    for source in sources:
        wanted = tensors_of(source)
        reader.restore(files_of(source))
        check_same(reader, wanted, ranks)
        if source.name.endswith(f"stage-{alike}"):
            found = [(step.loss, step.gradient_norm) for step in train(reader, 2, ranks.rank)]
            for pair, other in zip(found, json.loads((source / NEXT).read_text()), strict=True):
                assert pair == pytest.approx(other, rel=1e-4, abs=1e-6), (source.name, stage)
    reader.close()
    return len(sources)


def check_same(reader: Trainer, wanted: dict[str, torch.Tensor], ranks: Ranks) -> None:
    names = [name for name, _ in reader.causal_lm.named_parameters()]
    block = reader.capture()
    own = [name for index, name in enumerate(names) if index % ranks.world == ranks.rank]
    kinds = ("master", "exp_avg", "exp_avg_sq", "step")
    kept = [f"{kind}.{name}" for name in own for kind in kinds]
    kept += ["rollout_steps", "non_finite_in_a_row"] if ranks.rank == 0 else []
    assert len(wanted) == 4 * len(names) + 2
    different = [name for name in kept if not torch.equal(bits(block[name]), bits(wanted[name]))]
    assert different == []
    for name, parameter in parameters_of(reader).items():
        assert torch.equal(bits(parameter), bits(wanted[f"master.{name}"].to(parameter.dtype))), name


def with_negative_zeros(source: Path, folder: Path) -> None:
    """A state that only exact copying preserves."""
    tensors = tensors_of(source)
    for name, tensor in tensors.items():
        if name.startswith(("master", "exp_avg.")):
            tensor.flatten()[::3] = -0.0
    folder.mkdir()
    save_file(tensors, folder / "rank-0000.safetensors")


class Matrix(NamedTuple):
    """`stages` that write, as one and two ranks; those that read, by number of ranks; those that two ranks continue."""

    stages: tuple[int, ...]
    readers: dict[int, tuple[int, ...]]
    continued: tuple[int, ...]

    @property
    def written(self) -> int:
        """States: each stage's, alone and, if there are other ranks, by two; and one with negative zeros."""
        return len(self.stages) * (2 if self.readers else 1) + 1

    def after(self, stage: int) -> int:
        return self.stages[(self.stages.index(stage) + 1) % len(self.stages)]


ALONE = Matrix((1, 3), {}, ())
# Two ranks write their states and read all; three, by which few tensors are divisible, only read.
WHOLE = Matrix(STAGES, {2: STAGES, 3: (2, 3)}, (0, 1, 3))


@pytest.mark.parametrize(
    "matrix", [pytest.param(ALONE, id="alone"), pytest.param(WHOLE, marks=pytest.mark.slow, id="whole")]
)
def test_any_ranks_and_stage_read_the_state_of_any_other(
    tiny_model: Path, tmp_path: Path, alone: Ranks, matrix: Matrix
) -> None:
    folder = tmp_path / "states"
    leave_states(tiny_model, folder, matrix.stages, alone)
    with_negative_zeros(folder / f"1-ranks-stage-{matrix.stages[0]}", folder / "negative-zeros")
    for world in matrix.readers:
        run_ranks(tiny_model, folder, world)
    found = [check_reading(tiny_model, folder, stage, matrix.after(stage), alone) for stage in matrix.stages]
    assert found == [matrix.written] * len(matrix.stages)
    assert not matrix.readers or len(files_of(folder / "2-ranks-stage-3")) == 2


def run_ranks(model: Path, folder: Path, world: int) -> None:
    code = (
        "from tests.learner.test_training_state import main; "
        f"main({str(model)!r}, {str(folder)!r}, {{rank}}, {{world}}, {{port}})"
    )
    processes = start_programs(code, world)
    try:
        ended = [process.wait(600) for process in processes]
    finally:
        end_ranks(processes)
    assert ended == [0] * world, "\n".join(process.output() for process in processes)


def main(model: str, folder: str, rank: int, world: int, port: int) -> None:
    """Run one of several ranks."""
    ranks = Ranks(rank, world, "127.0.0.1", port, timeout_s=300)
    if world == 2:
        leave_states(Path(model), Path(folder), WHOLE.stages, ranks)
    ranks.all_reduce(torch.zeros(1))  # all files are written
    for stage in WHOLE.readers[world]:
        assert check_reading(Path(model), Path(folder), stage, WHOLE.after(stage), ranks) == WHOLE.written
        ranks.all_reduce(torch.zeros(1))
    if world == 2:
        for stage in WHOLE.continued:
            check_continuation(Path(model), Path(folder).with_name(f"continued-{stage}"), stage, "float32", ranks)
    leave(ranks)


OTHERS = {
    "allgather_bucket_size": 1000,
    "allgather_partitions": False,
    "contiguous_gradients": False,
    "enable_sanity_checks": True,
    "ignore_unused_parameters": False,
    "memory_efficient_linear": False,
    "overlap_comm": True,
    "reduce_bucket_size": 1000,
    "reduce_scatter": False,
    "stage3_allgather_sequential": True,
    "stage3_max_live_parameters": 1000,
    "stage3_max_reuse_distance": 0,
    "stage3_model_persistence_threshold": 1000,
    "stage3_param_persistence_threshold": 100_000,
    "stage3_prefetch_bucket_size": 0,
    "stage3_use_all_reduce_for_fetch_params": True,
    "sub_group_size": 1000,
    "use_multi_rank_bucket_allreduce": False,
}
"""Another value than DeepSpeed's default, for each argument that a recipe may give and that concerns training."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_argument_of_deepspeed_changes_the_state(tiny_model: Path) -> None:
    names = {name.partition(".")[2] for name in DEEPSPEED if name.startswith("zero_optimization.")}
    assert names - {"log_trace_cache_warnings"} == set(OTHERS)
    code = f"from tests.learner.test_training_state import compare; compare({str(tiny_model)!r}, {{rank}}, {{port}})"
    processes = start_programs(code, 2)
    try:
        ended = [process.wait(1500) for process in processes]
    finally:
        end_ranks(processes)
    assert ended == [0, 0], "\n".join(process.output() for process in processes)


def compare(model: str, rank: int, port: int) -> None:
    """One of two ranks: the state after a rollout step without further arguments, and with each of them."""
    ranks = Ranks(rank, 2, "127.0.0.1", port, timeout_s=300)
    for stage in (1, 2, 3):
        wanted = trained_state(Path(model), stage, {}, ranks)
        for name, value in OTHERS.items():
            found = trained_state(Path(model), stage, {name: value}, ranks)
            other = [key for key in wanted if not torch.allclose(found[key], wanted[key], rtol=1e-4, atol=1e-6)]
            assert not other, f"at stage {stage}, {name} = {value} changes {other}"
    leave(ranks)


def trained_state(model: Path, stage: int, arguments: dict[str, Any], ranks: Ranks) -> dict[str, torch.Tensor]:
    trainer = open_trainer(model, stage, "float32", ranks, deepspeed={"zero_optimization": arguments})
    train(trainer, 0, ranks.rank)
    names = [name for name, _ in trainer.causal_lm.named_parameters()]
    own = [name for index, name in enumerate(names) if index % ranks.world == ranks.rank]
    block = trainer.capture()
    found = {f"{kind}.{name}": block[f"{kind}.{name}"].clone() for name in own for kind in ("master", "exp_avg")}
    trainer.close()
    return found


@pytest.mark.slow
def test_in_bfloat16_parameters_are_the_rounded_masters(tiny_model: Path, tmp_path: Path, alone: Ranks) -> None:
    for stage in STAGES:
        writer = open_trainer(tiny_model, stage, "bfloat16", alone)
        for version in (0, 1):
            train(writer, version, 0)
        write_state(writer.capture(), tmp_path / str(stage), 0)
        writer.close()
    masters = tensors_of(tmp_path / "1")
    unrounded = [
        name
        for name, tensor in masters.items()
        if name.startswith("master") and bool((tensor != tensor.bfloat16()).any())
    ]
    assert len(unrounded) == 20
    for stage in STAGES:
        reader = open_trainer(tiny_model, stage, "bfloat16", alone)
        for source in STAGES:
            reader.restore(files_of(tmp_path / str(source)))
            check_same(reader, tensors_of(tmp_path / str(source)), alone)
        reader.close()


def test_a_state_of_another_policy_is_rejected(tiny_model: Path, tmp_path: Path, alone: Ranks) -> None:
    untied = write_tiny_model(tmp_path / "untied", tied=False)
    for name, model, stage, dtype in (("untied", untied, 1, "float32"), ("wide", tiny_model, 0, "float64")):
        writer = open_trainer(model, stage, dtype, alone)
        write_state(writer.capture(), tmp_path / name, 0)
        writer.close()
    reader = open_trainer(tiny_model, 1, "float32", alone)
    for name, text in (
        ("untied", r"'exp_avg\.lm_head\.weight': float32 \[107, 128\] is not valid: expected none"),
        ("wide", r"embed_tokens\.weight': float64 \[107, 128\] is not valid: expected float32 \["),
    ):
        with pytest.raises(ArchiveError, match=text):
            reader.restore(files_of(tmp_path / name))
    with pytest.raises(ArchiveError, match="none is not valid: expected float32"):
        reader.restore([])
    truncated = tmp_path / "truncated.safetensors"
    truncated.write_bytes((tmp_path / "wide/rank-0000.safetensors").read_bytes()[:-1])
    with pytest.raises(ArchiveError, match=r"truncated\.safetensors: cannot be read"):
        reader.restore([truncated])
    # The state is unchanged.
    record: tuple[OptimizerStepRecord, ...] = train(reader, 0, 0)
    assert all(step.applied and math.isfinite(step.loss or 0.0) for step in record)
    reader.close()
