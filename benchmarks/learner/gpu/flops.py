"""Owns model FLOP utilisation: the operations that training needs per rollout step, and what devices can do.

Must not measure.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from benchmarks.learner.gpu.workload import Load, Shape

H100 = "NVIDIA H100 Tensor Core GPU datasheet"
H200 = "NVIDIA H200 Tensor Core GPU datasheet"
A100 = "NVIDIA A100 Tensor Core GPU datasheet"
PEAKS: tuple[tuple[str, float, str], ...] = (
    (r"H200 NVL", 835.5, H200),
    (r"H200|GH200", 989.5, H200),
    (r"H100 NVL", 835.5, H100),
    (r"H100 PCIe", 756.5, "NVIDIA H100 PCIe product brief"),
    (r"H100", 989.5, H100),
    (r"A100", 312.0, A100),
    (r"L40S", 362.0, "NVIDIA L40S datasheet"),
    (r"L4\b", 121.0, "NVIDIA L4 datasheet"),
    (r"A10\b", 125.0, "NVIDIA A10 datasheet"),
)
"""bfloat16 TFLOP/s without sparsity, by the first pattern found in the device's name, with the source. The datasheets
of Hopper and of the L4 print twice as much, with sparsity."""


def peak_flops(name: str) -> tuple[float, str] | None:
    """(FLOP/s of the device called `name`, source); None if it is not in the table."""
    for pattern, tera, source in PEAKS:
        if re.search(pattern, name):
            return tera * 1e12, source
    return None


def step_flops(shape: Shape, parameters: int, load: Load) -> float:
    """The operations of one rollout step: forward and backward, without what is computed twice.

    PaLM (arXiv 2204.02311, appendix B) counts 6 N per token, and 12 L H T for attention over T tokens, where H is the
    width of all heads; causal attention counts in full, as there. The embedding is looked up, not multiplied, for
    inputs; as the output layer it counts for the trained tokens only, because no other token passes through it.
    """
    embedding = shape.vocabulary * shape.hidden
    attention = 12 * shape.layers * shape.hidden * load.row_tokens
    inputs = load.rows * load.row_tokens * (6 * (parameters - embedding) + attention)
    return float(inputs + load.rows * load.response * 6 * embedding)


def drawn_flops(shape: Shape, parameters: int, prompt: int, lengths: Sequence[Sequence[int]]) -> float:
    """The operations of a rollout step whose groups have responses of these `lengths`, as in `step_flops`.

    The prompt of a group counts once, however often it is computed, because that is what the step needs.
    """
    embedding, others = shape.vocabulary * shape.hidden, parameters - shape.vocabulary * shape.hidden
    attention = 12 * shape.layers * shape.hidden
    total = 0
    for members in lengths:
        total += prompt * (6 * others + attention * prompt)
        for tokens in members:
            total += (tokens - 1) * (6 * others + attention * (prompt + tokens - 1)) + tokens * 6 * embedding
    return float(total)
