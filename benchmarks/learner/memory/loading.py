"""Owns the memory benchmark of the learner: the peaks of its ranks while they load and train, against the estimate.

Must not measure files that are only mapped. Run it as `python -m benchmarks.learner.memory.loading`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from learner.model.memory import LearnerMemory, learner_memory
from learner.model.shape import ModelShape, folder_shape
from services.contracts import Batch, BatchGroup, BatchSample
from services.settings import Recipe, parse_recipe
from services.streams.delivery.payloads import SamplePayload
from tests.harness.batches import batch_with
from tests.harness.free_ports import free_port

ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144"}
"""With these, glibc returns freed blocks to the system, so that the process holds only what is in use."""
HIDDEN, VOCABULARY, TOKENS = 1024, 4_000, 8


@dataclass(frozen=True)
class Measured:
    """The highest peaks over the ranks, in bytes above `process`, which has all imports and a tiny model trained."""

    process: int
    loading: int
    training: int
    need: LearnerMemory


def write_model(folder: Path, gigabytes: float) -> Path:
    """Write a random Llama of about this size in float32, in several files."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    per_layer = 16 * HIDDEN * HIDDEN
    layers = max(1, round((gigabytes * 1e9 / 4 - 2 * VOCABULARY * HIDDEN) / per_layer)) if gigabytes else 1
    hidden, vocabulary = (HIDDEN, VOCABULARY) if gigabytes else (64, 128)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="200MB")
    return folder


def recipe_of(folder: Path, stage: int, dtype: str, ranks: int) -> Recipe:
    """A recipe whose micro-batches are so small that the state of the model counts."""
    return parse_recipe(
        {
            "name": "memory",
            "model": {"path": str(folder), "max_model_len": 4 * TOKENS},
            "rollout": {"max_new_tokens": TOKENS},
            "algorithm": {"group_size": 2, "overlong": {"punishment": False}},
            "learner": {
                "ranks": ranks,
                "zero_stage": stage,
                "dtype": dtype,
                "mini_batch_groups": ranks,
                "micro_batch_tokens": 4 * TOKENS,
            },
            "limits": {"rollout_steps": 1, "groups_per_step": 2 * ranks, "max_inflight_groups": 64},
        }
    )


def measure(folder: Path, stage: int, dtype: str, ranks: int, *, by_transformers: bool = False) -> Measured:
    """Load and train two optimizer steps on `ranks` processes of this machine.

    `by_transformers`: load as if the files could not be read directly. Raises RuntimeError if a rank fails.
    """
    with tempfile.TemporaryDirectory() as tiny:
        write_model(Path(tiny), 0.0)
        arguments = [str(folder), tiny, str(stage), dtype, str(ranks), str(free_port()), str(int(by_transformers))]
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.learner.memory.loading", "--rank"]
        processes = [
            subprocess.Popen(
                [*command, json.dumps([rank, *arguments])],
                env={**os.environ, **ALLOCATOR, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]
        ended = [process.communicate(timeout=1800) for process in processes]
    for process, (_, errors) in zip(processes, ended, strict=True):
        if process.returncode:
            raise RuntimeError(f"a rank failed: {errors[-2000:]}")
    peaks = [json.loads(output.splitlines()[-1]) for output, _ in ended]
    highest = {name: max(found[name] for found in peaks) for name in peaks[0]}
    need = learner_memory(recipe_of(folder, stage, dtype, ranks), _shape(folder), stage)
    return Measured(need=need, **highest)


def _shape(folder: Path) -> ModelShape:
    found = folder_shape(folder)
    assert found is not None, "write_model states it"
    return found


class Peak:
    """The highest anonymous memory of this process since the last `take`."""

    def __init__(self) -> None:
        self._peak = 0
        threading.Thread(target=self._watch, daemon=True).start()

    @staticmethod
    def now() -> int:
        """The anonymous memory of this process, in bytes."""
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))

    def _watch(self) -> None:
        while True:
            self._peak = max(self._peak, self.now())
            time.sleep(0.005)

    def take(self) -> int:
        """The peak so far; the next one starts now."""
        found, self._peak = max(self._peak, self.now()), 0
        return found


def _step(vocabulary: int, groups: int) -> tuple[Batch, dict[str, SamplePayload]]:
    draw, payloads, members = np.random.default_rng(0), {}, []
    for group in range(groups):
        samples = []
        for index in range(2):
            key = f"{group}:{index}"
            prompt, answer = (draw.integers(0, vocabulary, TOKENS, dtype=np.int32) for _ in range(2))
            payloads[key] = SamplePayload(prompt, answer, np.full(TOKENS, -5.0, np.float32), "", "stop", ())
            sample: dict[str, Any] = {"payload": key, "tokens": TOKENS, "advantage": 1.0 - 2 * index, "reward": 1.0}
            samples.append(BatchSample(correct=True, masked=False, staleness=0, **sample))
        members.append(BatchGroup(group=str(group), samples=tuple(samples)))
    return batch_with(members, step=1), payloads


def _rank(rank: int, folder: str, tiny: str, stage: str, dtype: str, world: str, port: str, old: str) -> None:
    """Run one rank: a tiny model first, so that imports and caches are there, then the real one."""
    from learner.training import deepspeed_engine, trainer
    from learner.training.network import loading
    from learner.training.process_group import Ranks

    ranks = Ranks(rank, int(world), "127.0.0.1", int(port), timeout_s=600)
    peak, found = Peak(), {}
    make_engine = deepspeed_engine.training_engine

    def engine(*arguments: Any) -> Any:
        found["loading"] = peak.take()
        return make_engine(*arguments)

    vars(trainer)["training_engine"] = engine
    if int(old):
        loading._unknown_format = lambda *_: "this is a comparison"
    for path in (tiny, folder):
        found["process"] = peak.now()
        peak.take()
        training = trainer.Trainer(Path(path), recipe_of(Path(path), int(stage), dtype, int(world)), ranks)
        batch, payloads = _step(_shape(Path(path)).vocabulary, 2 * int(world))
        plans = training.plan(batch)
        own = {sample.payload for plan in plans for sample in plan.shares[rank]}
        training.train(plans, {key: payloads[key] for key in own})
        found["training"] = peak.take()
        training.close()
        del training
    print(json.dumps({name: size - (name != "process") * found["process"] for name, size in found.items()}), flush=True)
    trainer.leave(ranks)


def main() -> None:
    """Print the measured and the estimated peaks by stage, and with --before those of loading by transformers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the model in float32")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--before", action="store_true")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        _rank(*json.loads(options.rank))
        return
    with tempfile.TemporaryDirectory() as path:
        folder = write_model(Path(path), options.gigabytes)
        shape = _shape(folder)
        print(f"{shape.parameters / 1e6:.0f} M parameters, {options.ranks} ranks, {options.dtype}; MB per rank")
        print("stage  process  loading: measured  plan  ratio   training: measured  plan  ratio")
        for stage in options.stages:
            for by_transformers in (False, True) if options.before else (False,):
                _print(stage, measure(folder, stage, options.dtype, options.ranks, by_transformers=by_transformers))


def _print(stage: int, found: Measured) -> None:
    # On a CPU, device and host are one.
    trained = max(found.need.total, found.need.loading + found.need.host_loading)
    pairs = [(found.loading, found.need.loading), (found.training, trained)]
    cells = [f"{size / 1e6:12,.0f} {plan / 1e6:10,.0f} {size / plan:6.2f}" for size, plan in pairs]
    print(f"{stage:5} {found.process / 1e6:8,.0f} {'   '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
