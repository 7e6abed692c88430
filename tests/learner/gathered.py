"""Owns the count of ZeRO-3's gathers by forward pass, and the program of a rank that trains with them counted.

Must not know how many gathers are right. Not used outside tests.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from learner.training.process_group import Ranks, end_with
from learner.training.trainer import Trainer, leave
from tests.learner.cases import EVERYTHING, Case, large_for_zero, run_case

CASES = {
    f"{dtype}-{stage}": Case(
        f"{dtype}-{stage}", stage, dtype, budget=1, data="uneven", algorithm=EVERYTHING, short_cut=False
    )
    for dtype in ("float32", "bfloat16")
    for stage in (0, 3)
}
"""One response per micro-batch: the longest and the short ones on rank 0, two others on rank 1, which adds fillers."""


@dataclass
class Pass:
    """A forward pass over `tokens` trained tokens, and the backward pass after it. `trained`: whether it has one.

    `gathers`: by parameter.
    """

    trained: bool
    tokens: int
    gathers: dict[str, int] = field(default_factory=dict)


def count_gathers(trainer: Trainer, passes: list[Pass]) -> None:
    """Append an entry to `passes` for each forward pass of the policy or its reference from now on."""

    def begin(module: Any, _: Any, arguments: dict[str, Any]) -> None:
        passes.append(Pass(torch.is_grad_enabled(), arguments["targets"].numel()))

    for module in (trainer._engine.module, trainer._reference.module):
        module.register_forward_pre_hook(begin, with_kwargs=True)
        names = {id(parameter): name for name, parameter in module.causal_lm.named_parameters()}
        for parameter in module.parameters():
            # DeepSpeed gathers some parameters at once by calling this method of one of them.
            parameter.all_gather_coalesced = _counted(parameter.all_gather_coalesced, names, passes)


def _counted(gather: Any, names: dict[int, str], passes: list[Pass]) -> Any:
    def counted(parameters: Iterable[Any], *arguments: Any, **named: Any) -> Any:
        together, gathers = list(parameters), passes[-1].gathers
        for name in (names[id(parameter)] for parameter in together):
            gathers[name] = gathers.get(name, 0) + 1
        return gather(together, *arguments, **named)

    return counted


def end(folder: str, out: str, rank: int, world: int, port: int) -> None:
    """Be a rank, see `main`, and exit with its status."""
    end_with(lambda: main(folder, out, rank, world, port))


def main(folder: str, out: str, rank: int, world: int, port: int) -> int:
    """Run all cases as one rank of `world`. Each rank writes its passes at stage 3; rank 0 writes the results."""
    torch.set_num_threads(1)
    ranks = Ranks(rank, world, "127.0.0.1", port, timeout_s=100)
    # Prefetches depend on the passes before, so that equal passes would differ in their gathers.
    with large_for_zero(stage3_prefetch_bucket_size=0):
        for case in CASES.values():
            _run(Path(folder), Path(out), case, ranks)
    leave(ranks)
    return 0


def _run(folder: Path, out: Path, case: Case, ranks: Ranks) -> None:
    passes: list[Pass] = []

    def watch(trainer: Trainer) -> None:
        count_gathers(trainer, passes)

    found, trained = run_case(folder, case, ranks, watch) if case.stage == 3 else run_case(folder, case, ranks)
    (out / f"{case.name}.rank-{ranks.rank}.json").write_text(json.dumps([asdict(entry) for entry in passes]))
    if ranks.rank == 0:
        loss = torch.tensor(trained.optimizer[0].loss, dtype=torch.float64)
        save_file(found | {"loss": loss}, out / f"{case.name}.safetensors")
