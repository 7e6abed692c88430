"""Owns the rounding of bfloat16, drawn at random in float64: how far log-probs, loss and gradient may be from exact.

Must not run anything in bfloat16: the bounds are those of any processor. tests/conformance/rounding.py bounds rounding
from above, without assumptions on how errors add up; at 8 bits such a bound of a gradient is as large as the gradient.

Here each rounding multiplies a value by 1 + u r, where u is bfloat16's unit roundoff, 2^-8, and r is drawn from
[-1, 1]: round-to-nearest misses by up to half a unit in the last place, in either direction, independently (the model
of Monte Carlo arithmetic, Parker 1997; Higham and Mary, SIAM J. Sci. Comput. 41, 2019). The float64 network is run with
such factors on the output of every operation, forward and backward. The spread of its results over the draws is the
size of the rounding errors, with all their amplification by layers, clips and cancelling. A bound is ROOM times that:
inner products count as one rounding, and a GPU may round their partial sums too, so there may be up to four times as
many roundings, whose errors are then twice as large.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tests.conformance.rounding import Exact, Problem, difference

UNIT = torch.finfo(torch.bfloat16).eps / 2
ROOM, DRAWS = 2.0, 8
NORM, PRODUCT, RESIDUAL = 4, 1, 2
OUTPUTS = {"input_layernorm": NORM, "post_attention_layernorm": NORM, "v_proj": PRODUCT, "o_proj": PRODUCT}
OUTPUTS |= {"q_proj": 4, "k_proj": 4}  # the product, its rotation (2), and the scores that it is part of
OUTPUTS |= {"gate_proj": PRODUCT, "act_fn": 2, "up_proj": PRODUCT, "down_proj": PRODUCT}
"""The roundings in sequence up to the output of a module of a layer, by its name."""
INPUTS = {"o_proj": 4, "down_proj": PRODUCT}
"""Those of its input since the last counted output: softmax (3) and its product; the product with the gate."""


class _Rounded(torch.autograd.Function):
    """Rounds a value, and in the backward pass its gradient, each with errors of their own."""

    @staticmethod
    def forward(context: Any, value: Tensor, size: float, draw: torch.Generator) -> Tensor:
        context.size, context.draw = size, draw
        return _rounded(value, size, draw)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _rounded(gradient, context.size, context.draw), None, None


def _rounded(value: Tensor, size: float, draw: torch.Generator) -> Tensor:
    errors = 2 * torch.rand(value.shape, generator=draw, dtype=value.dtype) - 1
    return value * (1 + size * errors)


@contextmanager
def rounding(model: Any, seed: int, *, head: bool) -> Iterator[None]:
    """The float64 `model` rounds as bfloat16 does, with errors drawn from `seed`. `head`: its output layer too."""
    draw, handles = torch.Generator().manual_seed(seed), []

    def rounded(value: Any, roundings: int) -> Any:
        if isinstance(value, tuple):
            return (rounded(value[0], roundings), *value[1:])
        return _Rounded.apply(value, UNIT * math.sqrt(roundings), draw)

    def after(module: Any, roundings: int) -> None:
        handles.append(module.register_forward_hook(lambda _module, _given, output: rounded(output, roundings)))

    for layer in model.model.layers:
        for name, module in layer.named_modules():
            place = name.rpartition(".")[2]
            if place in OUTPUTS:
                after(module, OUTPUTS[place])
            if place in INPUTS:
                roundings = INPUTS[place]
                handles.append(
                    module.register_forward_pre_hook(lambda _module, given, count=roundings: rounded(given, count))
                )
        after(layer, RESIDUAL)
    after(model.model.norm, NORM)
    if head:
        after(model.lm_head, PRODUCT)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class Bounds:
    """How far bfloat16 may be from float64. Nats: the largest and the typical (root mean square) error of a log-prob.

    loss: absolute; gradient: of |dg| / |g|.
    """

    largest: float
    typical: float
    loss: float
    gradient: float


def drawn(problem: Problem, seed: int, *, head: bool) -> tuple[Tensor, Exact]:
    """The log-probs of all responses, and loss and gradient, with the errors of a seed."""
    again = replace(problem)  # without what it has computed
    with rounding(problem.model, seed, head=head):
        found = again.exact()
        return torch.cat([logprobs.detach() for logprobs, _ in again.policy.values()]), found


def bounds(problem: Problem, exact: Exact, *, head: bool = True) -> Bounds:
    """The bounds of a mini-batch. `head`: whether the logits are rounded to bfloat16 too."""
    expected = torch.cat([logprobs.detach() for logprobs, _ in problem.policy.values()])
    largest, squares, losses, gradients = [], [], [], []
    for seed in range(DRAWS):
        logprobs, found = drawn(problem, seed, head=head)
        gap = logprobs - expected
        largest.append(float(gap.abs().max()))
        squares.append(float(gap.square().mean()))
        losses.append(abs(found.loss - exact.loss))
        gradients.append(difference(found.gradient, exact.gradient) ** 2)
    return Bounds(
        largest=ROOM * max(largest),
        typical=ROOM * math.sqrt(sum(squares) / DRAWS),
        loss=ROOM * max(losses),
        # And the rounding of the gradient itself, once per micro-batch.
        gradient=ROOM * math.sqrt(sum(gradients) / DRAWS) + UNIT,
    )
