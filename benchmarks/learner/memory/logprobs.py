"""Owns the memory benchmark of log-probs: peak memory of log-probs, entropies and gradients against the full logits.

Must not allocate the full logits; their size is computed. Run it as `python benchmarks/learner/memory/logprobs.py`.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time

import torch

from learner.algorithm.logprobs import CHUNK_TOKENS, token_logprobs

KIB = 1024 if sys.platform.startswith("linux") else 1


def peak_bytes() -> int:
    """The peak memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB


def measure(tokens: int, vocabulary: int, hidden: int, *, entropy_gradient: bool) -> tuple[int, float]:
    """Run one forward and backward pass in float32 on the CPU. Returns (peak bytes above the start, seconds).

    The bytes include the gradient of the head's weight.
    """
    torch.manual_seed(0)
    head = torch.nn.Linear(hidden, vocabulary, bias=False)
    states = torch.randn(tokens, hidden, requires_grad=True)
    targets = torch.randint(0, vocabulary, (tokens,))
    # The first pass allocates what does not depend on the size (thread pools, kernels).
    _pass(states[:2], targets[:2], head, entropy_gradient)
    before, started = peak_bytes(), time.monotonic()
    _pass(states, targets, head, entropy_gradient)
    return peak_bytes() - before, time.monotonic() - started


def _pass(states: torch.Tensor, targets: torch.Tensor, head: torch.nn.Linear, entropy_gradient: bool) -> None:
    logprobs, entropy = token_logprobs(states, targets, head, entropy_gradient=entropy_gradient)
    torch.autograd.backward(logprobs.sum() + entropy.sum())


def main() -> None:
    """Print the peak and its ratio to the size of the full logits; with --raw only the peak in bytes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--vocabulary", type=int, default=150_000)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--entropy-gradient", action="store_true")
    parser.add_argument("--raw", action="store_true")
    options = parser.parse_args()
    found, seconds = measure(
        options.tokens, options.vocabulary, options.hidden, entropy_gradient=options.entropy_gradient
    )
    if options.raw:
        print(found)
        return
    full = options.tokens * options.vocabulary * 4
    print(f"{options.tokens} tokens, vocabulary {options.vocabulary}, hidden {options.hidden}, float32, both passes")
    print(f"chunks of {CHUNK_TOKENS}: peak {found / 1e6:,.0f} MB above the start, {seconds:.1f} s")
    print(f"full logits alone: {full / 1e6:,.0f} MB; ratio chunked / full {found / full:.3f}")


if __name__ == "__main__":
    main()
