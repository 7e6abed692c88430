"""Top-p on CPUs keeps the tokens that vLLM's own function keeps, which sorts the vocabulary."""

from __future__ import annotations

import pytest
import torch
from vllm.v1.sample.ops import topk_topp_sampler
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

from rollout.processes import vllm_worker
from rollout.processes.top_p import LIKELIEST, mask_outside

VOCABULARY = 3000


def logits(*scales: float) -> torch.Tensor:
    """A row per scale; the larger, the fewer tokens have the mass."""
    return torch.randn(len(scales), VOCABULARY, generator=torch.Generator().manual_seed(1)) * torch.tensor(
        scales
    ).unsqueeze(-1)


def kept(row: torch.Tensor) -> int:
    return int(row.isfinite().sum())


@pytest.mark.parametrize("k", [None, [5, 40, 300, VOCABULARY]])
@pytest.mark.parametrize("p", [[0.7] * 4, [1.0, 0.2, 1.0, 0.999], [1.0] * 4])
def test_the_nuclei_are_those_of_vllm(k: list[int] | None, p: list[float]) -> None:
    given, masses = logits(0.1, 1.0, 2.0, 4.0), torch.tensor(p)
    most = None if k is None else torch.tensor(k)
    expected = apply_top_k_top_p_pytorch(given.clone(), None if most is None else most.clone(), masses)
    assert torch.equal(mask_outside(given.clone(), most, masses), expected)


def test_small_and_large_nuclei_share_a_batch() -> None:
    """The large one is found by sorting; neither changes the other."""
    found = mask_outside(logits(0.1, 4.0), None, torch.tensor([0.9, 0.9]))
    assert kept(found[0]) > LIKELIEST > kept(found[1]) > 1


def test_the_likeliest_token_stays() -> None:
    row = torch.full((1, 10), -3.0)
    row[0, 7] = 20.0
    assert mask_outside(row, None, torch.tensor([0.01]))[0].isfinite().nonzero().tolist() == [[7]]


def test_without_top_p_only_top_k_counts() -> None:
    given = logits(1.0)
    assert kept(mask_outside(given.clone(), torch.tensor([3]), None)[0]) == 3
    assert torch.equal(mask_outside(given.clone(), None, None), given)


def test_vllms_sampler_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU a worker installs it, and the sampler looks the function up where it was installed."""
    assert vllm_worker.current_platform.is_cpu()
    assert topk_topp_sampler.apply_top_k_top_p is mask_outside
    called = list[torch.Tensor]()

    def noting(given: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor) -> torch.Tensor:
        called.append(p)
        return mask_outside(given, k, p)

    monkeypatch.setattr(topk_topp_sampler, "apply_top_k_top_p", noting)
    given, p = logits(4.0, 4.0), torch.tensor([0.01, 0.01])
    drawn, _ = topk_topp_sampler.TopKTopPSampler("processed_logprobs").forward_cpu(given.clone(), {}, None, p)
    assert drawn.tolist() == given.argmax(-1).tolist()
    assert called == [p]
