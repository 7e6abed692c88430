"""Owns the mutation run: it applies each fault of the table to a copy of the code, and reports which test catches it.

Must not change the checkout. `python -m tests.mutations.run [PART OF A NAME ...]`; status 1 if a fault survives.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from tests.mutations.platform import PLATFORM
from tests.mutations.table import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = (".git", ".venv*", ".*_cache", ".hypothesis", "__pycache__", "*.egg-info")
"""Parts of a checkout that no test reads; byte code, because a mutated file may keep its size and time stamp."""
DATA = (ROOT / "runs", ROOT / "deploy" / "compose" / "secrets")
"""What a stack wrote into the checkout. Named by path, because sources have folders of these names too."""
ALL = [*MUTATIONS, *PLATFORM]
SUITE = ("tests",)
"""Where the conformance suite is: all tests with its mark."""
EVERY_COMMIT = "not slow and not system and not images and not gpu"
"""The tests of `make test`, which must catch every fault."""
CONFORMANCE = "conformance and not slow"
NEAR = {
    "learner/algorithm/reductions.py": ("tests/conformance/test_reductions.py",),
    "learner/algorithm/clipping.py": ("tests/conformance/test_clipping.py", "tests/conformance/test_cispo.py"),
    "learner/algorithm/corrections.py": ("tests/conformance/test_corrections.py",),
    "learner/algorithm/ratios.py": ("tests/conformance/test_ratios.py", "tests/conformance/test_corrections.py"),
    "learner/algorithm/kl.py": ("tests/conformance/test_kl.py",),
    "learner/algorithm/parity.py": ("tests/learner/test_parity.py",),
    "learner/coordinator/parity_gate.py": ("tests/learner/test_parity.py",),
    "learner/algorithm/loss.py": ("tests/conformance/test_loss.py",),
    "learner/algorithm/logprobs.py": (
        "tests/conformance/test_logprobs.py",
        "tests/conformance/test_logprobs_memory.py",
    ),
    "verifier/sandbox/process.py": ("tests/verifier/sandbox/test_replies.py",),
    "learner/training/minibatches.py": (
        "tests/conformance/test_mini_batches.py",
        "tests/conformance/test_gradient_any_cut.py",
        "tests/learner/test_parity.py",
    ),
    "learner/training/step_start.py": ("tests/learner/test_gradients.py", "tests/conformance/test_value_head.py"),
    "learner/training/token_advantages.py": (
        "tests/conformance/test_value_head.py",
        "tests/conformance/test_gradient_invariance.py",
    ),
    "learner/algorithm/values.py": ("tests/conformance/test_values.py",),
    "learner/training/shares.py": ("tests/conformance/test_mini_batches.py",),
    "learner/training/network/attention.py": ("tests/learner/test_attention.py",),
    "learner/training/network/policy.py": ("tests/learner/test_gradients.py", "tests/learner/test_head.py"),
    "learner/training/deepspeed_engine.py": ("tests/learner/test_gradients.py", "tests/learner/test_accumulation.py"),
    "learner/training/trainer.py": ("tests/learner/test_gradients.py", "tests/learner/test_parity.py"),
    "services/sampler/queue/batching.py": (
        "tests/conformance/test_rewards.py",
        "tests/services/sampler/test_batching.py",
    ),
    "services/sampler/advantage/advantages.py": ("tests/conformance/test_advantages.py",),
    "services/sampler/advantage/filtering.py": ("tests/conformance/test_rewards.py",),
    "services/sampler/advantage/rewards.py": ("tests/conformance/test_rewards.py",),
    "services/sampler/evaluation/scores.py": ("tests/conformance/test_evaluation.py",),
    "services/sampler/evaluation/evaluator.py": ("tests/conformance/test_evaluation.py",),
    "services/sampler/backpressure.py": ("tests/services/sampler/test_backpressure.py",),
    "services/sampler/queue/dispatch.py": ("tests/services/sampler/test_dispatch.py",),
    "services/sampler/queue/publication.py": ("tests/services/sampler/test_dispatch.py",),
    "services/sampler/selection/posterior.py": ("tests/services/sampler/selection/test_posterior.py",),
    "services/sampler/selection/screening.py": ("tests/services/sampler/selection/test_screening.py",),
    "services/sampler/selection/strategies.py": ("tests/services/sampler/selection/test_strategies.py",),
    "services/sampler/selection/order.py": ("tests/services/sampler/selection/test_order.py",),
    "services/sampler/queue/unknowns.py": ("tests/services/sampler/test_unknowns.py",),
    "services/sampler/queue/starvation.py": ("tests/services/sampler/test_starvation.py",),
    "services/sampler/data/gathering.py": ("tests/services/sampler/test_prompts.py",),
    "services/settings/presets.py": ("tests/conformance/test_presets.py",),
    "rollout/engine.py": ("tests/rollout/test_engine_arguments.py",),
    "verifier/verifiers/answer_line.py": ("tests/verifier/test_answer_line.py",),
    "verifier/sandbox/finding.py": ("tests/verifier/sandbox/test_sandbox.py",),
    "verifier/sandbox/lane.py": (
        "tests/verifier/sandbox/test_separation.py",
        "tests/verifier/sandbox/test_hangs.py",
        "tests/verifier/sandbox/test_replies.py",
    ),
    "verifier/sandbox/background.py": (
        "tests/verifier/sandbox/test_hangs.py",
        "tests/verifier/sandbox/test_background.py",
    ),
    "verifier/verifiers/reasoning_gym.py": ("tests/verifier/verifiers/test_evaluating.py",),
}
"""The tests that most likely catch a fault in a file; if they do not, the whole suite runs."""
CAUGHT = ("FAILED ", "ERROR ")
"""Prefixes in pytest's summary for a test that failed, or whose fixtures failed."""
DEADLINE_S = 1800


class MutationError(RuntimeError):
    """The run cannot judge the suite: the unchanged code fails, or a mutation does not apply or does not run."""


class Verdict(NamedTuple):
    """`caught_by`: the first test that failed, None if the fault survived; `seconds`: the duration."""

    caught_by: str | None
    seconds: float


def copy_checkout(target: Path) -> None:
    """Copy the checkout into the folder `target`, which may exist."""

    def left_out(folder: str, names: list[str]) -> set[str]:
        data = {name for name in names if Path(folder, name) in DATA}
        return data | shutil.ignore_patterns(*LEFT_OUT)(folder, names)

    shutil.copytree(ROOT, target, ignore=left_out, dirs_exist_ok=True)


def mutated(text: str, mutation: Mutation) -> str:
    """The file's text with the fault in it. Raises MutationError unless `old` occurs exactly once."""
    count = text.count(mutation.old)
    if count != 1:
        raise MutationError(f"{mutation.name}: its old text occurs {count} times in {mutation.file}: expected once")
    return text.replace(mutation.old, mutation.new)


def run_suite(folder: Path, parts: tuple[str, ...] = SUITE, marks: str = CONFORMANCE) -> Verdict:
    """Run the tests of `parts` that `marks` select, up to the first failure. MutationError if they cannot run."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", marks, *parts]
    started = time.monotonic()
    try:
        finished = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Verdict(f"the suite, which did not end within {DEADLINE_S} s", time.monotonic() - started)
    seconds = time.monotonic() - started
    failed = [line for line in finished.stdout.splitlines() if line.startswith(CAUGHT)]
    if finished.returncode == 0:
        return Verdict(None, seconds)
    if finished.returncode != 1 or not failed:
        raise MutationError(f"the suite did not run:\n{finished.stdout[-3000:]}{finished.stderr[-1000:]}")
    return Verdict(failed[0].split(" ", 1)[1].split(" - ")[0], seconds)


def try_mutation(folder: Path, mutation: Mutation) -> Verdict:
    """Apply the mutation, run the tests that should catch it, and restore the file."""
    path = folder / mutation.file
    original = path.read_text()
    path.write_text(mutated(original, mutation))
    try:
        if mutation.tests:
            return run_suite(folder, mutation.tests, EVERY_COMMIT)
        near = run_suite(folder, NEAR[mutation.file], EVERY_COMMIT) if mutation.file in NEAR else None
        return near if near is not None and near.caught_by else run_suite(folder)
    finally:
        path.write_text(original)


def check_unchanged(folder: Path, chosen: list[Mutation]) -> None:
    """Raises MutationError if a test that should catch a fault fails without it."""
    runs = [run_suite(folder)] if any(not mutation.tests for mutation in chosen) else []
    if near := tuple(sorted({file for mutation in chosen for file in mutation.tests or NEAR.get(mutation.file, ())})):
        runs.append(run_suite(folder, near, EVERY_COMMIT))
    for unchanged in runs:
        if unchanged.caught_by is not None:
            raise MutationError(f"{unchanged.caught_by} fails without any mutation")
    print(f"unchanged: all pass in {sum(verdict.seconds for verdict in runs):.0f} s", flush=True)


def main(wanted: list[str]) -> int:
    """Try every mutation whose name contains one of `wanted` (default: all); returns the exit status."""
    chosen = [mutation for mutation in ALL if not wanted or any(part in mutation.name for part in wanted)]
    if not chosen:
        raise MutationError(f"no mutation's name contains any of {wanted}")
    survivors = []
    with tempfile.TemporaryDirectory(prefix="penstock-mutations-") as name:
        folder = Path(name)
        copy_checkout(folder)
        check_unchanged(folder, chosen)
        for mutation in chosen:
            verdict = try_mutation(folder, mutation)
            survivors += [mutation.name] if verdict.caught_by is None else []
            print(f"{mutation.name} | {mutation.file} | {verdict.caught_by or 'SURVIVED'}", flush=True)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} mutations caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
