"""Log-probs and entropies in chunks equal those of the full softmax, including the gradients."""

from __future__ import annotations

import pytest
import torch

from learner.algorithm.logprobs import BLOCK, CHUNK_TOKENS, token_logprobs

Pair = tuple[torch.Tensor, torch.Tensor]
chunked = pytest.mark.conformance(formula="log softmax(z / T)[o_t]; H = -sum p log p", setting="CHUNK_TOKENS")
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


def assert_equal(found: Pair, expected: Pair, inputs: list[torch.Tensor], *, entropy_gradient: bool) -> None:
    """Log-probs and entropies agree, and so do their gradients of `inputs`, whose dtype sets the tolerance."""
    tolerance = TOLERANCE[inputs[0].dtype]
    for value, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(value.double(), reference.double(), atol=tolerance, rtol=tolerance)
    assert found[1].requires_grad is entropy_gradient
    weights = torch.randn(2, len(found[0]), dtype=torch.float64)

    def gradients(pair: Pair) -> tuple[torch.Tensor, ...]:
        used = [(value * weight).sum() for value, weight in zip(pair, weights, strict=True)]
        return torch.autograd.grad(sum(used[: 1 + entropy_gradient]), inputs)

    for gradient, reference in zip(gradients(found), gradients(expected), strict=True):
        torch.testing.assert_close(gradient, reference, atol=10 * tolerance, rtol=10 * tolerance)


@chunked
def test_by_hand() -> None:
    """Logits (0, ln 3) give 1/4, 3/4 at T = 1, and (0, 2 ln 3) 1/10, 9/10 at T = 0.5."""
    hidden = torch.tensor([[0.0, 3.0], [0.0, 3.0]], dtype=torch.float64)
    hidden[:, 1] = hidden[:, 1].log()
    targets = torch.tensor([0, 1])
    found, entropy = token_logprobs(hidden, targets, torch.nn.Identity())
    assert found.exp().tolist() == pytest.approx([0.25, 0.75])
    # (1/4) ln 4 + (3/4) ln (4/3)
    assert entropy.tolist() == pytest.approx([0.562335, 0.562335], abs=1e-6)
    cooler, _ = token_logprobs(hidden, targets, torch.nn.Identity(), 0.5)
    assert cooler.exp().tolist() == pytest.approx([0.1, 0.9])


@chunked
@pytest.mark.parametrize("chunk_tokens", [1, 3, 7, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_any_chunking_is_the_full_softmax(
    chunk_tokens: int, dtype: torch.dtype, entropy_gradient: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("learner.algorithm.logprobs.CHUNK_TOKENS", chunk_tokens)
    torch.manual_seed(0)
    head = torch.nn.Linear(5, 11, bias=False, dtype=dtype)
    hidden = torch.randn(7, 5, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, 11, (7,))
    found, entropy = token_logprobs(hidden, targets, head, 0.5, entropy_gradient=entropy_gradient)
    logprobs = torch.log_softmax(head(hidden) / 0.5, -1)
    expected = logprobs.gather(-1, targets[:, None])[:, 0]
    entropies = -(logprobs.exp() * logprobs).sum(-1)
    assert_equal((found, entropy), (expected, entropies), [hidden, head.weight], entropy_gradient=entropy_gradient)


NUCLEI = [[3, 1], [10], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0], [2, 5, 1], [0, 4], [7, 10], [1, 2, 3]]
"""Of 7 tokens over 11 words; each token is the last of its nucleus."""


def renormalised(logits: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """By definition, token by token, in float64: p(token) / p(nucleus), and the entropy of p / p(nucleus)."""
    chosen, entropies = [], []
    for row, nucleus in zip(torch.softmax(logits.double() / temperature, -1), NUCLEI, strict=True):
        shares = row[nucleus] / row[nucleus].sum()
        chosen.append(shares[-1].log())
        entropies.append(-(shares * shares.log()).sum())
    return torch.stack(chosen), torch.stack(entropies)


@pytest.mark.conformance(formula="log p(o_t) - log sum of p over the nucleus", setting="rollout.top_p, rollout.top_k")
@pytest.mark.parametrize("chunk_tokens", [1, 3, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_nuclei_renormalise(
    chunk_tokens: int, dtype: torch.dtype, entropy_gradient: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("learner.algorithm.logprobs.CHUNK_TOKENS", chunk_tokens)
    torch.manual_seed(0)
    head = torch.nn.Linear(5, 11, bias=False, dtype=dtype)
    hidden = torch.randn(7, 5, dtype=dtype, requires_grad=True)
    longest = max(map(len, NUCLEI))
    nuclei = torch.tensor([part + [-1] * (longest - len(part)) for part in NUCLEI], dtype=torch.int32)
    targets = torch.tensor([part[-1] for part in NUCLEI])
    options = {"entropy_gradient": entropy_gradient, "nuclei": nuclei}
    found, entropy = token_logprobs(hidden, targets, head, 0.5, **options)
    expected, entropies = renormalised(head(hidden), 0.5)
    assert found.dtype == dtype
    assert_equal((found, entropy), (expected, entropies), [hidden, head.weight], entropy_gradient=entropy_gradient)


@pytest.mark.conformance(formula="log p(o_t) - log sum of p over the nucleus", setting="rollout.top_p, rollout.top_k")
def test_a_word_outside_the_nucleus_changes_nothing() -> None:
    """Not even word 0, which stands in for padding, and whose probability is nearly 1 in the whole vocabulary."""
    logits = torch.tensor([[1e30, 0.0, 3.0, 9.0], [1e30, 0.0, 3.0, 9.0]], requires_grad=True)
    nuclei = torch.tensor([[2, 1, -1], [3, 2, 1]], dtype=torch.int32)
    found, entropy = token_logprobs(
        logits, torch.tensor([2, 1]), torch.nn.Identity(), entropy_gradient=True, nuclei=nuclei
    )
    # exp(3) / (exp(3) + 1), and 1 / (exp(9) + exp(3) + 1)
    assert found.tolist() == pytest.approx([-0.0485874, -9.0025986], abs=1e-5)
    gradient = torch.autograd.grad((found + entropy).sum(), logits)[0]
    assert bool(gradient.isfinite().all())
    assert gradient[:, 0].tolist() == [0.0, 0.0]
    assert gradient[0, 3] == 0.0


@chunked
@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_any_block_gives_the_same_bits(entropy_gradient: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of one row, of two and of all five; the logits, which are the caller's here, stay as they are."""
    torch.manual_seed(0)
    logits, targets, found = torch.randn(5, 11, requires_grad=True), torch.randint(0, 11, (5,)), []
    before = logits.detach().clone()
    for words in (1, 22, 1000):
        monkeypatch.setitem(BLOCK, "cpu", words)
        pair = token_logprobs(logits, targets, torch.nn.Identity(), 0.5, entropy_gradient=entropy_gradient)
        used = pair[0].sum() + (pair[1].sum() if entropy_gradient else 0)
        found.append(torch.cat([*(value.detach() for value in pair), torch.autograd.grad(used, logits)[0].flatten()]))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert torch.equal(logits, before)


@chunked
def test_the_last_chunk_runs_the_head_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of chunks of 3, 3 and 1 tokens, the backward pass computes the logits of the first two again."""
    monkeypatch.setattr("learner.algorithm.logprobs.CHUNK_TOKENS", 3)
    calls: list[int] = []
    head = torch.nn.Linear(2, 3)
    head.register_forward_hook(lambda _module, inputs, _output: calls.append(len(inputs[0])))
    found, _ = token_logprobs(torch.randn(7, 2), torch.zeros(7, dtype=torch.int64), head)
    assert calls == [3, 3, 1]
    found.sum().backward()
    assert calls[3:] == [3, 3]


@chunked
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_summed_in_float32(dtype: torch.dtype) -> None:
    """4,096 equal logits have probability 1 / 4096 each. Half precision cannot represent its logarithm."""
    found, entropy = token_logprobs(torch.ones(1, 4096, dtype=dtype), torch.tensor([7]), torch.nn.Identity())
    assert found.dtype == entropy.dtype == torch.float32
    assert found.item() == pytest.approx(-8.317766, abs=1e-5)
    assert entropy.item() == pytest.approx(8.317766, abs=1e-5)


@chunked
@pytest.mark.parametrize("tokens", [0, 1, CHUNK_TOKENS, 2 * CHUNK_TOKENS + 1])
def test_no_chunk_exceeds_its_size(tokens: int) -> None:
    head = torch.nn.Linear(2, 3)
    calls: list[int] = []
    head.register_forward_hook(lambda _module, inputs, _output: calls.append(len(inputs[0])))
    found, _ = token_logprobs(torch.randn(tokens, 2), torch.zeros(tokens, dtype=torch.int64), head)
    assert len(found) == sum(calls) == tokens
    assert max(calls) <= CHUNK_TOKENS
    assert len(calls) == max(1, -(-tokens // CHUNK_TOKENS))
