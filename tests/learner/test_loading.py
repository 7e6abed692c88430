"""Weights read from the shards are those of `from_pretrained`, bit by bit, whole and cut into parts of ranks."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from learner.training.network import shards
from learner.training.network.loading import load_network, whole
from learner.training.process_group import Ranks
from learner.training.trainer import Trainer, leave
from services.settings import Recipe, parse_recipe
from tests.harness.small_run import recipe_document
from tests.learner.architectures import CONVERTED, READ_DIRECTLY, write_model
from tests.learner.checkpointing import train
from tests.learner.running import end_ranks, start_programs

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:(torch|deepspeed)"),
    pytest.mark.filterwarnings("ignore::FutureWarning:(torch|deepspeed)"),
]
CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
PARTITIONED = {"llama": "bfloat16", "qwen2-tied": "float32", "gpt2": "bfloat16"}
WARNING = "this rank loads the whole model to host memory, because"


def read(folder: Path, dtype: torch.dtype) -> Any:
    return load_network(folder, dtype, CPU, whole(CPU))


def expected(folder: Path, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")


def check_same(found: Any, wanted: Any) -> None:
    """Names, tied parameters, dtypes, bits, buffers, settings."""
    assert type(found) is type(wanted)
    assert found.training == wanted.training
    assert found.config.to_dict() == wanted.config.to_dict()
    assert found.generation_config.to_dict() == wanted.generation_config.to_dict()
    for tensors in ("named_parameters", "named_buffers"):
        ours, theirs = dict(getattr(found, tensors)()), dict(getattr(wanted, tensors)())
        assert list(ours) == list(theirs)
        for name, tensor in theirs.items():
            assert ours[name].dtype == tensor.dtype, name
            assert ours[name].requires_grad == tensor.requires_grad, name
            assert torch.equal(ours[name], tensor), name


@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", READ_DIRECTLY)
def test_the_shards_give_the_weights_of_transformers(
    name: str, saved: torch.dtype, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "BLOCK_ELEMENTS", 1000)
    folder = write_model(tmp_path, READ_DIRECTLY[name], saved)
    assert (folder / "model.safetensors.index.json").is_file()
    for dtype in DTYPES:
        check_same(read(folder, dtype), expected(folder, dtype))
    assert WARNING not in caplog.text


def test_one_file_is_read_like_several(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_model(tmp_path, READ_DIRECTLY["qwen3"], torch.bfloat16, shard="1GB")
    assert (folder / "model.safetensors").is_file()
    check_same(read(folder, torch.float32), expected(folder, torch.float32))
    assert WARNING not in caplog.text


@pytest.mark.parametrize("name", CONVERTED)
def test_transformers_loads_what_it_converts(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_model(tmp_path, CONVERTED[name], torch.float32)
    with caplog.at_level(logging.WARNING):
        check_same(read(folder, torch.bfloat16), expected(folder, torch.bfloat16))
    assert f"{WARNING} transformers converts '" in caplog.text


def test_transformers_loads_any_other_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """PyTorch's own files, a file without a tensor, with one too many, with a tied one twice, of another shape."""
    config = READ_DIRECTLY["qwen2-tied"]
    weights = load_file(write_model(tmp_path / "good", config, torch.float32, shard="1GB") / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    norm = weights["model.norm.weight"]
    changes: dict[str, tuple[dict[str, torch.Tensor], str]] = {
        "one too many": ({"extra.weight": norm.clone()}, "'extra.weight' is in the files, but is no parameter of"),
        "twice": ({"lm_head.weight": embedding.clone()}, "'model.embed_tokens.weight' is in the files 2 times"),
    }
    for name, (added, reason) in changes.items():
        folder = write_model(tmp_path / name, config, torch.float32, shard="1GB")
        save_file(weights | added, folder / "model.safetensors", metadata={"format": "pt"})
        caplog.clear()
        check_same(read(folder, torch.float32), expected(folder, torch.float32))
        assert f"{WARNING} " in caplog.text
        assert reason in caplog.text, name
    pickled = write_model(tmp_path / "pickled", config, torch.float32, shard="1GB")
    (pickled / "model.safetensors").unlink()
    torch.save(weights, pickled / "pytorch_model.bin")
    caplog.clear()
    check_same(read(pickled, torch.float32), expected(pickled, torch.float32))
    assert "has no safetensors files" in caplog.text


def test_a_damaged_or_missing_shard_is_named(tmp_path: Path) -> None:
    folder = write_model(tmp_path, READ_DIRECTLY["llama"], torch.float32)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    first, last = min(index["weight_map"].values()), max(index["weight_map"].values())
    content = (folder / first).read_bytes()
    (folder / first).write_bytes(content[:-4])
    with pytest.raises(ValueError, match=rf"^model: '.*{first}' is not valid: expected a safetensors file; "):
        read(folder, torch.float32)
    (folder / first).write_bytes(content)
    (folder / last).unlink()
    with pytest.raises(ValueError, match=rf"^model: '.*{last}' is not valid: expected a safetensors file; "):
        read(folder, torch.float32)


def partitioned_recipe(folder: Path, dtype: str) -> Recipe:
    sections = {"learner": {"zero_stage": 3, "dtype": dtype}, "algorithm": {"kl_coefficient": 0.1}}
    return parse_recipe(recipe_document(folder, **sections))


def check_partitioned(folder: Path, dtype: str, ranks: Ranks) -> None:
    """The policy and its reference are cut, have the weights of transformers when gathered, and can train."""
    import deepspeed

    trainer = Trainer(folder, partitioned_recipe(folder, dtype), ranks)
    wanted = dict(expected(folder, getattr(torch, dtype)).named_parameters())
    for network in (trainer.causal_lm, trainer._reference.module.causal_lm):
        parameters = dict(network.named_parameters())
        assert list(parameters) == list(wanted)
        for name, parameter in parameters.items():
            assert parameter.ds_tensor.numel() == -(-wanted[name].numel() // ranks.world), name
            with deepspeed.zero.GatheredParameters([parameter]):
                assert torch.equal(parameter, wanted[name]), name
        for name, buffer in network.named_buffers():
            assert torch.equal(buffer, dict(expected(folder, getattr(torch, dtype)).named_buffers())[name]), name
    assert all(step.applied for step in train(trainer, 0, ranks.rank))
    trainer.close()


@pytest.mark.slow
def test_every_rank_reads_its_own_part(tmp_path: Path) -> None:
    """Three ranks, by which few tensors are divisible."""
    for name in PARTITIONED:
        write_model(
            tmp_path / name,
            type(READ_DIRECTLY[name])(**{**READ_DIRECTLY[name].to_dict(), "vocab_size": 107}),
            torch.bfloat16,
        )
    processes = start_programs(
        f"from tests.learner.test_loading import main; main({str(tmp_path)!r}, {{rank}}, {{world}}, {{port}})", 3
    )
    try:
        ended = [process.wait(500) for process in processes]
    finally:
        end_ranks(processes)
    text = "\n".join(process.output() for process in processes)
    assert ended == [0] * 3, text
    assert WARNING not in text


def main(folder: str, rank: int, world: int, port: int) -> None:
    """Run one of several ranks."""
    logging.basicConfig(level=logging.WARNING)
    ranks = Ranks(rank, world, "127.0.0.1", port, timeout_s=120)
    for name, dtype in PARTITIONED.items():
        check_partitioned(Path(folder) / name, dtype, ranks)
    leave(ranks)
