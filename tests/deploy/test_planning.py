"""`penstock plan` and `penstock algorithm`: published figures, and numbers computed by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deploy.cli.main import app
from deploy.cli.planning import Throughput, booked_gpus, checkpoint_bytes, rank_balance, step_time
from learner.model.fit import replica_memory, sync_bytes
from learner.model.memory import GIB, activation_bytes, learner_memory
from learner.model.shape import ModelShape, model_shape
from services.settings import PRESETS, Recipe, load_recipe, parse_recipe
from tests.harness.small_run import recipe_document

RECIPES = Path(__file__).parents[2] / "deploy" / "recipes"
SHAPE = ModelShape("any", parameters=7_500_000_000, layers=10, hidden=100, vocabulary=1000, kv_values=2 * 10 * 2 * 50)


def recipe(**sections: Any) -> Recipe:
    return parse_recipe(recipe_document("/none", **sections))


@pytest.mark.parametrize(
    ("stage", "gigabytes", "wider"), [(0, 120.0, 0), (1, 31.4, 4), (2, 16.6, 2 / 64), (3, 1.9, 2 / 64)]
)
def test_memory_by_stage_matches_the_zero_paper(stage: int, gigabytes: float, wider: float) -> None:
    # arXiv 1910.02054, figure 1: 7.5 billion parameters on 64 devices, mixed precision with Adam. The paper's gradients
    # are 16 bits wide; ours have `wider` bytes more per parameter.
    wanted = recipe(learner={"ranks": 64, "dtype": "bfloat16", "zero_stage": stage})
    need = learner_memory(wanted, SHAPE, stage)
    found = (need.parameters + need.gradients + need.optimizer) / 1e9
    assert found == pytest.approx(gigabytes + 7.5 * wider, abs=0.05)


def test_a_reference_policy_costs_a_copy() -> None:
    with_kl = recipe(learner={"ranks": 4}, algorithm={"kl_coefficient": 0.1})
    assert learner_memory(with_kl, SHAPE, 2).reference == 4 * 7.5e9
    assert learner_memory(with_kl, SHAPE, 3).reference == 7.5e9
    assert learner_memory(recipe(), SHAPE, 2).reference == 0


def test_a_checkpoint_holds_master_weights_and_two_moments() -> None:
    assert checkpoint_bytes(recipe(learner={"dtype": "bfloat16"}), SHAPE) == 12 * SHAPE.parameters


def test_activations_with_and_without_checkpointing() -> None:
    # The longest sample (256 tokens) exceeds the micro-batch; 17 x 4 bytes x 256 tokens x 100 units, 10 layers.
    sections = {"micro_batch_tokens": 64}
    logits = 3 * 4 * 256 * 1000
    assert activation_bytes(recipe(learner=sections), SHAPE) == 17_408_000 + logits
    # each layer's input, 4 x 256 x 100 bytes, ten times, and one layer's inside
    checkpointed = recipe(learner=sections | {"activation_checkpointing": True})
    assert activation_bytes(checkpointed, SHAPE) == 1_024_000 + 1_740_800 + logits
    # the copy of a float32 head and its gradient, 4 x 100 x 1000 bytes each, only beside 16-bit weights
    for dtype, copied in (("float32", 0), ("bfloat16", 800_000)):
        plain = activation_bytes(recipe(learner={"dtype": dtype}), SHAPE)
        headed = recipe(learner={"dtype": dtype}, model={"head_dtype": "float32"})
        assert activation_bytes(headed, SHAPE) == plain + copied


def test_cache_and_sync() -> None:
    wanted = recipe(
        rollout={"dtype": "bfloat16", "tensor_parallel": 2, "kv_cache_mib": 64}, learner={"dtype": "float32"}
    )
    need = replica_memory(wanted, SHAPE)
    assert need.kv_per_token == 4000
    assert need.kv_tokens == 2 * 64 * 2**20 / 4000
    assert need.longest_sequences == need.kv_tokens / 256
    assert need.weights == 7.5e9
    assert need.staged == sync_bytes(wanted, SHAPE) == 30e9
    assert replica_memory(recipe(weights={"staging": "host", "bucket_mib": 64}), SHAPE).staged == 64 * 2**20


def test_an_evaluation_reserves_no_learner() -> None:
    sections = {"rollout": {"replicas": 2, "gpus": 1.0}, "learner": {"ranks": 2, "gpus": 1.0}}
    assert booked_gpus(recipe(**sections)) == 4
    assert booked_gpus(recipe(**sections, limits={"rollout_steps": 0})) == 2


def test_ranks_of_the_papers_recipe_have_the_same_work() -> None:
    paper = load_recipe(RECIPES / "qwen2.5-32b-dapo.yaml")
    assert 0.95 < rank_balance(paper, 10_240) < 1
    assert rank_balance(recipe(learner={"ranks": 1}), 12) == 1


def test_time_of_a_step() -> None:
    # 4 groups of 4, 10 tokens each: 160 trained; half the groups survive: 320 generated.
    stated = Throughput(generation=20, learning=10, link=30e9, survival=0.5, response_tokens=10)
    overlapping = step_time(recipe(rollout={"replicas": 2}), SHAPE, stated)
    assert (overlapping.generating, overlapping.learning, overlapping.syncing) == (8, 16, 1)
    assert overlapping.total == 17
    in_turns = step_time(recipe(rollout={"replicas": 2}, limits={"max_staleness": 0}), SHAPE, stated)
    assert in_turns.total == 25
    unfiltered = recipe(algorithm={"dynamic_sampling": {"enabled": False}})
    assert step_time(unfiltered, SHAPE, stated).sampled_tokens == 160


def test_a_shape_matches_the_model(tiny_model: Path, tmp_path: Path) -> None:
    from safetensors import safe_open

    with safe_open(tiny_model / "model.safetensors", "pt") as file:
        stored = sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118
    found = model_shape(parse_recipe(recipe_document(tiny_model)).model, tmp_path)
    assert found.parameters == stored, "the tied embedding must count once"
    assert (found.layers, found.hidden, found.kv_values) == (2, 128, 2 * 2 * 1 * 64)


def test_the_papers_recipe_fits() -> None:
    loaded = load_recipe(RECIPES / "qwen2.5-32b-dapo.yaml")
    shape = model_shape(loaded.model, Path("/none"))
    assert shape.parameters == 32_763_876_352  # Qwen/Qwen2.5-32B as published
    need = replica_memory(loaded, shape)
    assert need.weights + need.staged + loaded.rollout.kv_cache_mib * 2**20 < 75 * GIB
    assert learner_memory(loaded, shape, loaded.learner.zero_stage).total < 75 * GIB


@pytest.mark.parametrize("name", sorted(path.name for path in RECIPES.glob("*.yaml")))
def test_plan_prints_every_need(name: str) -> None:
    found = CliRunner().invoke(app, ["plan", str(RECIPES / name)])
    assert found.exit_code == 0, found.output
    for part in (
        "ZeRO stage",
        "host memory per rank while a checkpoint is written",
        "KV cache per token",
        "bytes per weight sync",
        "rollout step",
    ):
        assert part in found.output


def test_cost_is_gpus_times_hours_times_price() -> None:
    # 8 GPUs; at these throughputs a step takes 699.7 s (docs/cluster.md), and 200 of them 38.87 h.
    stated = ["--generation", "6000", "--learning", "3000", "--price", "2.5"]
    found = CliRunner().invoke(app, ["plan", str(RECIPES / "qwen2.5-7b-dapo.yaml"), *stated])
    rows = [[cell.strip() for cell in line.strip("│ ").split("│")] for line in found.output.splitlines()]
    assert ["GPUs, reserved for the whole run", "8"] in rows
    assert ["GPU-hours of training", "311"] in rows
    assert ["cost at 2.5 per GPU-hour", "777"] in rows


def test_plan_without_a_shape_names_the_missing_fields(tmp_path: Path) -> None:
    import yaml

    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe_document("/nowhere")))
    found = CliRunner().invoke(app, ["plan", str(path)])
    assert found.exit_code == 2
    assert "model.path" in found.output
    assert "'/nowhere'" in found.output
    assert "model.architecture" in found.output


def test_presets_are_printed() -> None:
    found = CliRunner().invoke(app, ["algorithm", "presets"])
    assert found.exit_code == 0
    for name, settings in PRESETS.items():
        assert name in found.output
        assert all(path in found.output for path in settings)


def test_diff_prints_values_and_sources() -> None:
    found = CliRunner().invoke(app, ["algorithm", "diff", "dapo", "dapo-verl"])
    lines = {line.split("\u2502")[1].strip(): line for line in found.output.splitlines() if line.count("\u2502") == 6}
    warm_up = lines["learner.warmup_rollout_steps"]
    assert [part.strip() for part in warm_up.split("\u2502")][2:5:2] == ["20", "10"]
    assert "algorithm.clip_high" not in lines, "equal settings must not be printed"
    assert "10.0" in lines["algorithm.dual_clip"]
    assert "clip_ratio_c=10.0" in found.output
    assert CliRunner().invoke(app, ["algorithm", "diff", "dapo", "reinforce"]).exit_code == 2
