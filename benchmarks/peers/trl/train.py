"""Owns TRL's side of the training comparison: the demo's model, problems and settings, trained by GRPOTrainer.

Must not depend on anything that the environment of the comparison does not install. Runs in that environment:

    .venv-trl/bin/python -m benchmarks.peers.trl.train --model FOLDER --problems train.json --held-out held-out.json
      --out trl.json [--seed N] [--steps 12] [--evaluate-every K] [--save-every K FOLDER]

The process trains with the DAPO loss, `updates_per_step` optimizer updates per rollout, in float32 on the CPU; the
settings are those of the recipe, which problems.py wrote. Rewards: +1 or -1 by Penstock's own verifier, and TRL's soft
overlong punishment. FILE of --out gets `started` (Unix seconds of the process's start), `startup_seconds` and
`startup_cpu_seconds` (until the first rollout starts), `steps` (each rollout step's end, in `seconds` and `cpu_seconds`
since the first rollout started) and `evaluations` (avg@k on the held-out problems, before the first step, each K steps
and after the last). Evaluations and saved weights are not counted in any of these seconds, and draw from a random
generator of their own. Processor time is that of all threads. Nothing is pinned: the caller may (taskset).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import psutil
import torch
from datasets import Dataset
from transformers import GenerationConfig, PrinterCallback, TrainerCallback
from transformers.utils import logging as transformers_logging
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import get_soft_overlong_punishment

from benchmarks.peers.trl.configuration import grpo_arguments
from benchmarks.peers.trl.record import Spent, TrainingRecord, average_at, due, spent, write
from verifier.verifiers.reasoning_gym import judge

MICRO_BATCH, THREADS = 16, 2
EVALUATED_AT_ONCE = 64
"""Responses of an evaluation that are generated together."""


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder of the initial weights")
    parser.add_argument("--problems", type=Path, required=True, help="train.json of problems.py")
    parser.add_argument("--held-out", type=Path, required=True, help="held-out.json of problems.py")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=12, help="rollout steps (12)")
    parser.add_argument("--evaluate-every", type=int, default=0, metavar="K", help="rollout steps (0: never)")
    parser.add_argument("--save-every", nargs=2, default=("0", ""), metavar=("K", "FOLDER"))
    # The defaults are the fastest found on two cores; see README.md.
    parser.add_argument("--threads", type=int, default=THREADS, help=f"of torch ({THREADS})")
    parser.add_argument("--micro-batch", type=int, default=MICRO_BATCH, help=f"responses ({MICRO_BATCH})")
    parser.add_argument("--continuous-batching", action="store_true", help="generate with transformers' own scheduler")
    parser.add_argument("--attention", default="sdpa", help="transformers' attn_implementation (sdpa)")
    parser.add_argument("--cache", help="transformers' cache_implementation (its default)")
    return parser.parse_args(arguments)


def verdict(completions: list[Any], reference: list[str], **_: Any) -> list[float]:
    """+1 for a correct response, -1 for a wrong one, by Penstock's verifier of reasoning-gym."""
    texts = [completion[0]["content"] for completion in completions]
    return [1.0 if judge(text, json.loads(of), {}).correct else -1.0 for text, of in zip(texts, reference, strict=True)]


class HeldOut:
    """The held-out problems of `path`, and how their answers are sampled."""

    def __init__(self, path: Path) -> None:
        document = json.loads(path.read_text())
        self.problems, self.sampling = document["problems"], document["sampling"]

    @torch.no_grad()
    def accuracy(self, model: Any, tokenizer: Any, stop_ids: list[int], seed: int) -> float:
        """avg@k of `model`, whose random generator afterwards is as before."""
        samples = self.sampling["samples"]
        config = GenerationConfig(
            do_sample=True,
            temperature=self.sampling["temperature"],
            top_p=self.sampling["top_p"],
            top_k=0,
            max_new_tokens=self.sampling["max_new_tokens"],
            num_return_sequences=samples,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=stop_ids,
        )
        was_training = model.training
        model.eval()
        correct: list[bool] = []
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            at_once = max(1, EVALUATED_AT_ONCE // samples)
            for start in range(0, len(self.problems), at_once):
                part = self.problems[start : start + at_once]
                chats = tokenizer.apply_chat_template(
                    [problem["messages"] for problem in part],
                    add_generation_prompt=True,
                    return_dict=True,
                    return_tensors="pt",
                    padding=True,
                    tokenizer_kwargs={"padding_side": "left"},
                )
                drawn = model.generate(**chats, generation_config=config)[:, chats["input_ids"].shape[1] :]
                texts = tokenizer.batch_decode(drawn, skip_special_tokens=True)
                references = [problem["reference"] for problem in part for _ in range(samples)]
                correct += [judge(text, of, {}).correct for text, of in zip(texts, references, strict=True)]
        model.train(was_training)
        return average_at(correct, samples)


class Watch(TrainerCallback):  # type: ignore[misc]
    """Records each rollout step, and evaluates and saves between them."""

    def __init__(self, given: argparse.Namespace, updates: int) -> None:
        started = psutil.Process().create_time()
        # The imports above belong to the start-up.
        self.record = TrainingRecord(started, Spent(time.time() - started, spent().cpu))
        self._given = given
        self._updates = updates
        self._held_out = HeldOut(given.held_out)
        self._save_every, self._saved = int(given.save_every[0]), Path(given.save_every[1])
        self.stop_ids: list[int] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Evaluate the initial policy."""
        self._between(0, given)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The trainer generates in its first step."""
        self.record.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """A rollout step ends with its last update."""
        step, left = divmod(state.global_step, self._updates)
        if left == 0:
            entry = self.record.end_step(step)
            print(f"step {step}: {entry['seconds']:.1f} s, {entry['cpu_seconds']:.1f} s of processor time", flush=True)
            self._between(step, given)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        """Print what shows that it learns."""
        if "reward" in logs:
            length = float(logs["completions/mean_length"])
            print(f"  mean reward {float(logs['reward']):.3f}, mean length {length:.1f} tokens", flush=True)

    def _between(self, step: int, given: dict[str, Any]) -> None:
        model, tokenizer = given["model"], given["processing_class"]
        with self.record.aside():
            if due(step, self._given.evaluate_every, self._given.steps):
                accuracy = self._held_out.accuracy(model, tokenizer, self.stop_ids, self._given.seed)
                self.record.evaluated(step, accuracy)
                print(f"  held-out accuracy after step {step}: {accuracy:.3f}", flush=True)
            if step and due(step, self._save_every, self._given.steps):
                folder = self._saved / f"step-{step}"
                model.save_pretrained(folder)
                tokenizer.save_pretrained(folder)


def trainer_of(given: argparse.Namespace, document: dict[str, Any], watch: Watch, folder: str) -> GRPOTrainer:
    """The trainer that the options ask for. `document`: that of train.json."""
    settings = document["settings"]
    arguments = grpo_arguments(
        settings,
        seed=given.seed,
        steps=given.steps,
        micro_batch=given.micro_batch,
        continuous=given.continuous_batching,
    )
    arguments["model_init_kwargs"]["attn_implementation"] = given.attention
    rows = [
        {"prompt": problem["messages"], "reference": json.dumps(problem["reference"])}
        for problem in document["problems"]
    ]
    rewards: list[Any] = [verdict]
    if cache := settings["overlong_cache"]:
        rewards.append(get_soft_overlong_punishment(settings["max_new_tokens"], cache))
    trainer = GRPOTrainer(
        model=str(given.model),
        reward_funcs=rewards,
        args=GRPOConfig(output_dir=folder, cache_implementation=given.cache, **arguments),
        train_dataset=Dataset.from_list(rows),
        callbacks=[watch],
    )
    trainer.remove_callback(PrinterCallback)
    watch.stop_ids = list(trainer.eos_token_ids)
    return trainer


def main(arguments: Sequence[str]) -> int:
    """Train, and write the record."""
    given = parsed(arguments)
    torch.set_num_threads(given.threads)
    transformers_logging.disable_progress_bar()
    document = json.loads(given.problems.read_text())
    watch = Watch(given, document["settings"]["updates_per_step"])
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(given, document, watch, folder)
        trainer.train()
    options = {name: getattr(given, name) for name in ("threads", "micro_batch", "continuous_batching", "attention")}
    write(given.out, watch.record.document(seed=given.seed, options=options, settings=document["settings"]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
