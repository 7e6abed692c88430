"""Owns how a batch is cut: mini-batches of whole groups, one share per rank, micro-batches within a token budget.

Must not hold the policy. Mini-batches and shares follow from the batch message alone, so all ranks agree on them
without communication, and each rank fetches only the payloads of its share.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from learner.algorithm.loss import TokenData
from learner.algorithm.parity import NOT_COMPARED
from learner.algorithm.reductions import REDUCTIONS, SampleSize
from learner.training.shares import PlannedSample, Share, distribute, row_length
from services.contracts import Batch, BatchGroup
from services.streams.delivery.nucleus import joined
from services.streams.delivery.payloads import SamplePayload

SHARED_ROW_TOKENS = 1024
"""Maximum length of a row in which responses share one prompt. The attention masks of its responses are dense, so the
memory grows with the square of the length."""


@dataclass(frozen=True)
class Sampled:
    """Which tokens were sampled with the weights from which a rollout step starts: those of policy `version`.

    Another version may belong to the same step, if a learner was restarted, and have other weights. `replicas`: who
    sampled the tokens of the step.
    """

    version: int
    replicas: tuple[str, ...]


def masked(batch: Batch, payloads: Collection[str]) -> Batch:
    """Mask the loss of the samples with these `payloads`. They stay in the statistics of their groups."""
    groups = []
    for group in batch.groups:
        samples = (
            sample.model_copy(update={"masked": True}) if sample.payload in payloads else sample
            for sample in group.samples
        )
        groups.append(group.model_copy(update={"samples": tuple(samples)}))
    return batch.model_copy(update={"groups": tuple(groups)})


@dataclass(frozen=True)
class MiniBatch:
    """The work of one optimizer step, as one share per rank. Masked and empty responses are left out.

    `trainable` is false, on every rank, if no response remains. `groups`: the names of its groups.
    """

    shares: tuple[Share, ...]
    groups: tuple[str, ...] = ()

    @property
    def trainable(self) -> bool:
        return any(self.shares)


def plan_step(
    batch: Batch, mini_batch_groups: int, reduction: str, ranks: int, *, longest: int, row_tokens: int
) -> list[MiniBatch]:
    """Cut a batch into mini-batches of `mini_batch_groups` whole groups, and each of them into `ranks` disjoint shares.

    The last mini-batch may hold fewer groups and is normalised by its own size. `longest` (tokens) is the divisor of
    the reduction `constant_length`. `row_tokens`: see `longest_shared_row`.
    """
    starts = range(0, len(batch.groups), mini_batch_groups)
    cuts = [batch.groups[start : start + mini_batch_groups] for start in starts]
    return [
        MiniBatch(_shares(groups, reduction, ranks, longest, row_tokens), tuple(group.group for group in groups))
        for groups in cuts
    ]


def _shares(
    groups: Sequence[BatchGroup], reduction: str, ranks: int, longest: int, row_tokens: int
) -> tuple[Share, ...]:
    members = [(group.group, sample) for group in groups for sample in group.samples]
    sizes = [SampleSize(name, sample.tokens, sample.masked) for name, sample in members]
    reduced = REDUCTIONS[reduction](sizes, longest)
    planned: dict[str, list[PlannedSample]] = {}
    for (name, sample), weight in zip(members, reduced.weights, strict=True):
        if weight > 0:
            share = weight / reduced.normaliser
            response = PlannedSample(sample.payload, name, sample.tokens, sample.advantage, share, sample.replica)
            planned.setdefault(name, []).append(response)
    prompt_tokens = {group.group: group.prompt_tokens for group in groups}
    return distribute(planned, prompt_tokens, ranks, row_tokens).shares


def longest_shared_row(budget: int, *, share_prompts: bool) -> int:
    """The maximum length of a row in which responses share a prompt, in tokens: 0 if they never do."""
    return min(budget, SHARED_ROW_TOKENS) if share_prompts else 0


@dataclass(frozen=True)
class MicroBatch:
    """The input of one forward pass: B rows of L tokens, and the N response tokens to be trained.

    input_ids, position_ids: int64 [B, L], padded on the right; or rows of any lengths end to end, as one of L tokens.
    rows: the lengths of these (`network.attention.Rows`); None for padded, causal rows.
    source: int64 [N], the position in the flattened [B * L] hidden states that predicts each token.
    targets: int64 [N]. data: float64 [N] each until `to` rounds them. replica: int64 [N], as in `EngineComparison.add`.
    nuclei: int32 [N, longest], what each target was drawn from, padded with -1; None: from the whole vocabulary. They
    stay on the host, because those of a rollout step may need gigabytes.
    """

    input_ids: Tensor
    position_ids: Tensor
    rows: tuple[tuple[int, ...], ...] | None
    source: Tensor
    targets: Tensor
    data: TokenData
    replica: Tensor
    nuclei: Tensor | None = None

    def to(self, device: torch.device, dtype: torch.dtype) -> MicroBatch:
        """Copy it to `device`, with its `data` in `dtype`, the dtype of the log-probs."""
        return replace(
            self,
            input_ids=self.input_ids.to(device),
            position_ids=self.position_ids.to(device),
            source=self.source.to(device),
            targets=self.targets.to(device),
            replica=self.replica.to(device),
            data=TokenData(
                behaviour=self.data.behaviour.to(device, dtype),
                advantage=self.data.advantage.to(device, dtype),
                weight=self.data.weight.to(device, dtype),
                sample=self.data.sample.to(device),
            ),
        )


@dataclass(frozen=True)
class _Row:
    """One prompt and the responses that share it."""

    prompt: np.ndarray
    samples: tuple[tuple[PlannedSample, SamplePayload], ...]

    @property
    def length(self) -> int:
        """The number of input tokens."""
        return row_length(len(self.prompt), [sample for sample, _ in self.samples])

    @property
    def segments(self) -> tuple[int, ...]:
        """The lengths of the prompt, with the response if it is alone, and of the responses that share the prompt."""
        if len(self.samples) == 1:
            return (self.length,)
        inputs = (sample.tokens - 1 for sample, _ in self.samples)
        return (len(self.prompt), *filter(None, inputs))


def micro_batches(
    share: Sequence[PlannedSample],
    payloads: dict[str, SamplePayload],
    budget: int,
    *,
    share_prompts: bool,
    sampled: Sampled | None = None,
) -> list[MicroBatch]:
    """Pack a share into micro-batches of at most `budget` tokens, padding included. A longer sample is alone in one.

    With `share_prompts`, rows lie end to end, without padding, and the responses of a group follow their prompt in one
    row and do not attend to each other. That gives the same log-probs for a fraction of the tokens. `sampled`: which
    tokens are compared with the engines' log-probs (None: none). Raises ValueError for a payload that contradicts the
    batch.
    """
    rows = _rows(share, payloads, longest_shared_row(budget, share_prompts=share_prompts))
    rows.sort(key=lambda row: -row.length)
    packed: list[list[_Row]] = []
    for row in rows:
        if not packed or _tokens([*packed[-1], row], padded=not share_prompts) > budget:
            packed.append([])
        packed[-1].append(row)
    return [_micro_batch(part, sampled, padded=not share_prompts) for part in packed]


def _tokens(rows: Sequence[_Row], *, padded: bool) -> int:
    """The tokens of a micro-batch with these rows, of which the first is the longest."""
    return len(rows) * rows[0].length if padded else sum(row.length for row in rows)


def filler() -> MicroBatch:
    """A micro-batch without loss, for a rank that has fewer micro-batches than the others."""
    zero = torch.zeros(1, dtype=torch.float64)
    ids = torch.zeros((1, 2), dtype=torch.int64)
    first = torch.zeros(1, dtype=torch.int64)
    data = TokenData(zero, zero, zero, first)
    return MicroBatch(ids, torch.arange(2).unsqueeze(0), None, first, first, data, torch.full((1,), NOT_COMPARED))


def _rows(share: Sequence[PlannedSample], payloads: dict[str, SamplePayload], longest: int) -> list[_Row]:
    rows: list[_Row] = []
    for sample in share:
        payload = payloads[sample.payload]
        tokens = len(payload.response_ids)
        if tokens != sample.tokens:
            raise ValueError(
                f"payload {sample.payload} holds {tokens} response tokens: "
                f"expected {sample.tokens}, as its batch states"
            )
        last = rows[-1] if rows else None
        fits = last is not None and last.length + tokens - 1 <= longest
        if last is not None and fits and np.array_equal(last.prompt, payload.prompt_ids):
            rows[-1] = _Row(last.prompt, (*last.samples, (sample, payload)))
        else:
            rows.append(_Row(payload.prompt_ids, ((sample, payload),)))
    return rows


def _micro_batch(rows: list[_Row], sampled: Sampled | None, *, padded: bool) -> MicroBatch:
    width = _tokens(rows[:1] if padded else rows, padded=padded)
    ids = np.zeros((len(rows) if padded else 1, width), dtype=np.int64)
    positions = np.tile(np.arange(width, dtype=np.int64), (len(ids), 1))
    # Where each row begins in the flattened tokens.
    starts = np.arange(len(rows)) * width if padded else np.cumsum([0, *(row.length for row in rows[:-1])])
    sources = [
        _fill(row, ids.reshape(-1), positions.reshape(-1), start) for row, start in zip(rows, starts, strict=True)
    ]
    members = [member for row in rows for member in row.samples]
    return MicroBatch(
        input_ids=torch.from_numpy(ids),
        position_ids=torch.from_numpy(positions),
        # Padding comes after every real token, so padded rows need no mask besides causality.
        rows=None if padded else tuple(row.segments for row in rows),
        source=torch.from_numpy(np.concatenate(sources).astype(np.int64)),
        targets=torch.from_numpy(np.concatenate([payload.response_ids for _, payload in members]).astype(np.int64)),
        data=_token_data(members),
        replica=torch.from_numpy(np.concatenate([_replica(*member, sampled) for member in members])),
        nuclei=_nuclei([payload for _, payload in members]),
    )


def _fill(row: _Row, ids: np.ndarray, positions: np.ndarray, start: int) -> np.ndarray:
    """Write a row's inputs and their positions, from `start` on. Returns the sources of its response tokens."""
    prompt, sources = len(row.prompt), []
    ids[start : start + prompt], positions[start : start + prompt] = row.prompt, np.arange(prompt)
    last, place = start + prompt - 1, start + prompt
    for sample, payload in row.samples:
        end = place + sample.tokens - 1
        ids[place:end] = payload.response_ids[:-1]
        positions[place:end] = np.arange(prompt, prompt + sample.tokens - 1)
        sources.append(np.concatenate([[last], np.arange(place, end)]))
        place = end
    return np.concatenate(sources)


def _replica(sample: PlannedSample, payload: SamplePayload, sampled: Sampled | None) -> np.ndarray:
    """The index of the replica that sampled each token [T]. A payload from the archive has no spans to tell."""
    found = np.full(sample.tokens, NOT_COMPARED, dtype=np.int64)
    for span in payload.spans:
        if sampled is not None and span.version == sampled.version:
            found[span.start : span.end] = sampled.replicas.index(sample.replica)
    return found


def _nuclei(payloads: Sequence[SamplePayload]) -> Tensor | None:
    given = [payload.nuclei for payload in payloads if payload.nuclei is not None]
    if not given:
        return None
    if len(given) < len(payloads):
        raise ValueError(f"{len(payloads) - len(given)} payloads have no nuclei: expected all to have them, or none")
    return torch.from_numpy(joined(given).padded())


def _token_data(members: Sequence[tuple[PlannedSample, SamplePayload]]) -> TokenData:
    tokens = torch.tensor([planned.tokens for planned, _ in members])
    behaviour = np.concatenate([payload.behaviour_logprobs for _, payload in members])
    per_sample = torch.tensor([(planned.advantage, planned.weight) for planned, _ in members], dtype=torch.float64)
    advantage, weight = per_sample.repeat_interleave(tokens, dim=0).unbind(1)
    sample = torch.arange(len(members)).repeat_interleave(tokens)
    return TokenData(torch.from_numpy(behaviour.astype(np.float64)), advantage, weight, sample)
