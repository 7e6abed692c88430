"""Owns how an ended group becomes a row of the archive: from its hash and its payloads, as Redis has them.

Must not do I/O. What is damaged is left out: it never stops the archive.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from pydantic import ValidationError

from services.contracts import BatchGroup, BatchSample, Lane, Outcome, Release, Task, Verdict
from services.sampler.advantage.advantages import advantages
from services.sampler.groups import stored_verdicts
from services.sampler.queue.batching import shaped_reward
from services.settings import Recipe
from services.storage.groups.story import ArchivedGroup, ArchivedSample, GroupRow, GroupTokens, no_tokens
from services.streams.delivery.payloads import PayloadMissingError, SamplePayload, unpack, unpack_without_nuclei
from services.streams.unarchived import EndedGroup

log = logging.getLogger(__name__)

NO_LOGPROBS = np.zeros(0, np.float32)


def archived_row(recipe: Recipe, lane: Lane, resumption: int, ended: EndedGroup, archived_ms: int) -> GroupRow:
    """The row of a group. `resumption`: that which last rewound the run."""
    fields = ended.fields
    task, verdicts, trained = _task(ended), _verdicts(ended), _trained_as(ended)
    payloads = _payloads(recipe, ended)
    shaped = _shaped(recipe, lane, task, verdicts, trained)
    indices = sorted({*verdicts, *payloads})
    samples = tuple(_sample(at, verdicts.get(at), payloads.get(at), shaped.get(at)) for at in indices)
    release = fields.get(b"state", b"").decode()
    _, held_out, name, _ = ended.name.split(".") if lane is Lane.EVALUATION and ended.name.count(".") == 3 else [""] * 4
    group = ArchivedGroup(
        group=ended.name,
        lane=lane,
        resumption=resumption,
        release=release,
        reason=fields.get(b"reason", b"").decode() or _reason(release, list(verdicts.values()), samples),
        evaluation=name,
        set=held_out,
        step=_number(fields, b"step") if trained else None,
        optimizer_step=_number(fields, b"optimizer_step") if trained else None,
        version=_number(fields, b"version") if trained else None,
        staleness=trained.staleness if trained else None,
        archived_ms=archived_ms,
        prompt=task.prompt if task else None,
        samples=samples,
    )
    return GroupRow(group, _tokens(indices, payloads))


def _task(ended: EndedGroup) -> Task | None:
    try:
        return Task.model_validate_json(ended.fields[b"task"])
    except (KeyError, ValidationError) as error:
        _damaged(ended, "task", error)
        return None


def _verdicts(ended: EndedGroup) -> dict[int, Verdict]:
    try:
        return dict(sorted(stored_verdicts(ended.fields).items()))
    except ValidationError as error:
        _damaged(ended, "verdicts", error)
        return {}


def _trained_as(ended: EndedGroup) -> BatchGroup | None:
    if b"trained_as" not in ended.fields:
        return None
    try:
        return BatchGroup.model_validate_json(ended.fields[b"trained_as"])
    except ValidationError as error:
        _damaged(ended, "trained_as", error)
        return None


def _damaged(ended: EndedGroup, what: str, error: Exception) -> None:
    log.warning("group %s is archived without its %s: %s", ended.name, what, " ".join(str(error).split())[:200])


def _payloads(recipe: Recipe, ended: EndedGroup) -> dict[int, SamplePayload]:
    read = unpack if recipe.rollout.top_k is None else unpack_without_nuclei
    found = {}
    for index, fields in sorted(ended.payloads.items()):
        try:
            found[index] = read(f"{ended.name}:{index}", fields)
        except PayloadMissingError as error:
            log.warning("%s", error)
    return found


def _shaped(
    recipe: Recipe, lane: Lane, task: Task | None, verdicts: Mapping[int, Verdict], trained: BatchGroup | None
) -> dict[int, dict[str, Any]]:
    """By index what the learner used of a sample, or would have used: reward, advantage, masked, staleness."""
    if trained is not None:
        return {_index(sample): _used(sample) for sample in trained.samples}
    if lane is Lane.EVALUATION or task is None or len(verdicts) < task.wanted:
        return {}
    rewards = {index: shaped_reward(recipe, verdict) for index, verdict in verdicts.items()}
    values = advantages(recipe.algorithm.advantage, list(rewards.values()))
    return {
        index: {"reward": reward, "advantage": value}
        for (index, reward), value in zip(rewards.items(), values, strict=True)
    }


def _index(sample: BatchSample) -> int:
    """The index of a sample, with which the key of its payload ends."""
    return int(sample.payload.rpartition(":")[2])


def _used(sample: BatchSample) -> dict[str, Any]:
    return sample.model_dump(include={"reward", "advantage", "masked", "staleness"})


def _sample(
    index: int, verdict: Verdict | None, payload: SamplePayload | None, shaped: dict[str, Any] | None
) -> ArchivedSample:
    known: dict[str, Any] = dict(shaped or {})
    if payload is not None:
        versions = [span.version for span in payload.spans]
        known |= {
            "prompt_tokens": len(payload.prompt_ids),
            "response_tokens": len(payload.response_ids),
            "finish_reason": payload.finish_reason,
            "text": payload.text,
            "spans": payload.spans,
            "oldest_version": min(versions, default=None),
            "newest_version": max(versions, default=None),
        }
    if verdict is not None:
        # Not by model_dump, which costs as much as all else; what a sample of the archive does not have is ignored.
        known |= vars(verdict.facts) | vars(verdict)
    return ArchivedSample.model_validate(known | {"index": index})


def _reason(release: str, verdicts: Sequence[Verdict], samples: Sequence[ArchivedSample]) -> str:
    """Why a group ended, where the sampler gave no reason: by its verdicts."""
    outcomes = [verdict.outcome for verdict in verdicts]
    counts = ", ".join(f"{outcomes.count(outcome)} {outcome.value}" for outcome in Outcome if outcome in outcomes)
    judged = f"of {len(outcomes)} verdicts {counts}" if outcomes else f"{len(samples)} samples, no verdict"
    if release == Release.FILTERED:
        scores = [verdict.score for verdict in verdicts if verdict.outcome is not Outcome.UNKNOWN]
        return f"no learning signal: {judged}; scores from {min(scores):g} to {max(scores):g}" if scores else judged
    return judged


def _number(fields: Mapping[bytes, bytes], name: bytes) -> int | None:
    value = fields.get(name, b"")
    return int(value) if value.isdigit() else None


def _tokens(indices: Sequence[int], payloads: Mapping[int, SamplePayload]) -> GroupTokens:
    """The tokens in the order of `indices`; none of a sample without a payload."""
    found = [payloads.get(index) for index in indices]
    return GroupTokens(
        prompt_ids=next((payload.prompt_ids for payload in found if payload), no_tokens()),
        response_ids=tuple(payload.response_ids if payload else no_tokens() for payload in found),
        behaviour_logprobs=tuple(payload.behaviour_logprobs if payload else NO_LOGPROBS for payload in found),
    )
