"""Owns the cases in which the trainer must compute the same gradient, and the work of a rank that computes it.

Must not compute the expected gradient; `dense` does. Not used outside tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from learner.training.process_group import Ranks, end_with
from learner.training.trainer import leave
from tests.learner.cases import EVERYTHING, ICEPOP, PPO, Case, run_case

DOUBLE = Case("", stage=0, dtype="float64")
"""ZeRO of DeepSpeed keeps its weights in float32, so float64 runs without ZeRO, except in WIDENED."""

IN_DOUBLE = (
    replace(DOUBLE, name="whole"),
    replace(DOUBLE, name="split", budget=40),
    replace(DOUBLE, name="one-response-each", budget=1),
    replace(DOUBLE, name="plain-rows", budget=64, share_prompts=False),
    replace(DOUBLE, name="backwards", budget=40, backwards=True),
    replace(DOUBLE, name="checkpointed", budget=64, checkpointing=True, share_prompts=False),
    *(
        replace(DOUBLE, name=reduction.replace("_", "-"), budget=60, algorithm={"reduction": reduction})
        for reduction in ("sequence_sum", "constant_length")
    ),
    replace(DOUBLE, name="everything", budget=40, algorithm=EVERYTHING, given_proximal=True, checkpointing=True),
    replace(DOUBLE, name="icepop", budget=40, algorithm=ICEPOP, given_proximal=True, share_prompts=False),
    replace(DOUBLE, name="behaviour-proximal", budget=40, algorithm={"proximal": "behaviour", "dual_clip": 1.5}),
    replace(DOUBLE, name="lopsided", data="lopsided", budget=60, algorithm=EVERYTHING, given_proximal=True),
    replace(DOUBLE, name="single", data="single", algorithm=EVERYTHING, given_proximal=True),
)

ZERO = (
    Case("everything", budget=40, algorithm=EVERYTHING, given_proximal=True, checkpointing=True),
    Case("lopsided", budget=90, data="lopsided", algorithm=ICEPOP, given_proximal=True, share_prompts=False),
    Case("single", data="single", algorithm=EVERYTHING, given_proximal=True),
)
"""For every stage: rows with shared prompts, layers that run twice, ranks with few tokens, a rank without tokens."""

IN_SINGLE = tuple(
    replace(case, name=f"zero-{stage}-{case.name}", stage=stage) for stage in range(1, 4) for case in ZERO
)

WIDENED = tuple(
    replace(case, name=f"zero-{stage}-{case.name}-widened", stage=stage, dtype="float64", widened=True)
    for stage in range(1, 4)
    for case in ZERO
)

CASES = {case.name: case for case in IN_DOUBLE + IN_SINGLE + WIDENED}
"""One optimizer step each."""

STEPS = {
    case.name: case
    for case in (
        replace(DOUBLE, name="two-steps", data="four", budget=40, mini_batch_groups=2, algorithm=EVERYTHING),
        replace(
            DOUBLE,
            name="ppo-zero-3-widened",
            data="four",
            budget=40,
            mini_batch_groups=2,
            algorithm=PPO,
            stage=3,
            widened=True,
        ),
        replace(DOUBLE, name="ppo", data="four", budget=40, mini_batch_groups=2, algorithm=PPO),
        replace(
            DOUBLE, name="partial", data="four", budget=40, mini_batch_groups=3, algorithm=ICEPOP, gradient_clip=0.1
        ),
    )
}
"""Two optimizer steps each. The last mini-batch of `partial` has one group instead of three."""

EVERY_COMMIT_ONE_RANK = {case.name for case in IN_DOUBLE} | {
    "zero-1-everything",
    "zero-2-everything",
    "zero-3-everything",
    "zero-1-lopsided",
    "zero-3-everything-widened",
}
EVERY_COMMIT_TWO_RANKS = {
    "everything",
    "lopsided",
    "zero-1-everything",
    "zero-2-everything",
    "zero-3-lopsided",
    "zero-3-everything-widened",
    "two-steps",
    "ppo",
    "ppo-zero-3-widened",
}
"""The other cases are marked slow. They cover no other code, only each stage with each kind of data."""


def end(folder: Path, out: Path, names: Sequence[str], rank: int, world: int, port: int) -> None:
    """Run the named cases as one rank of `world`, and exit. Rank 0 writes the results of each case."""
    end_with(lambda: _run(folder, out, names, Ranks(rank, world, "127.0.0.1", port, timeout_s=300)))


def _run(folder: Path, out: Path, names: Sequence[str], ranks: Ranks) -> int:
    torch.set_num_threads(1)
    for name in names:
        found, trained = run_case(folder, (CASES | STEPS)[name], ranks)
        if ranks.rank == 0:
            numbers = trained.metrics | {"first_loss": trained.optimizer[0].loss or 0.0}
            metrics = {f"metric.{key}": torch.tensor([value], dtype=torch.float64) for key, value in numbers.items()}
            save_file(found | metrics, out / f"{name}.safetensors")
    leave(ranks)
    return 0
