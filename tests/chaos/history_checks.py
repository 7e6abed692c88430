"""Owns the oracle's checks of a run's history: batches trained once, steps and versions in order, a correct archive.

Must not import the code under test.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from copy import deepcopy
from itertools import pairwise
from typing import Any

from tests.chaos.finding import Finding, Kind
from tests.chaos.story import Story

DAMAGED = "payload-damaged"
BATCH_LOST = "batch-lost"
PAYLOAD = re.compile(r":payload:(?P<group>[^:]+):(?P<index>\d+)$")


def the_tail_is_complete(story: Story) -> Iterator[Finding]:
    """The tail's file has every entry that a stream ever had, and Redis counts every entry of the file."""
    evidence = story.evidence
    for stream, added in evidence.added.items():
        read = evidence.read[stream]
        if added < 0:
            yield Finding(Kind.GAP, stream, "the tail did not finish")
        elif added > read:
            yield Finding(Kind.GAP, stream, f"{added} entries were added, but the tail read {read}")
        elif added < read and stream not in evidence.restarted:
            yield Finding(Kind.GAP, stream, f"the tail read {read} entries, but Redis counts {added}")


def no_group_is_trained_twice(story: Story) -> Iterator[Finding]:
    """In the surviving history a group is trained once, in one step."""
    for name, steps in story.trained.items():
        if len(steps) > 1:
            yield Finding(Kind.DUPLICATED, name, f"trained in steps {steps}")


def each_batch_is_published_once(story: Story) -> Iterator[Finding]:
    """In each life: one batch per step, and no group in two batches. An event batch-lost starts a new count."""
    published: dict[tuple[tuple[int, int], int], dict[str, Any]] = {}
    placed: dict[tuple[tuple[int, int], str], int] = {}
    for life, batch in story.messages_between("batches", BATCH_LOST):
        earlier = published.setdefault((life, batch["step"]), batch)
        if earlier != batch:
            yield Finding(Kind.DUPLICATED, f"step {batch['step']}", "two different batches were published for it")
        for group in batch["groups"]:
            step = placed.setdefault((life, group["group"]), batch["step"])
            if step != batch["step"]:
                text = f"in the batches of steps {step} and {batch['step']}"
                yield Finding(Kind.DUPLICATED, group["group"], text)


def steps_and_versions_rise(story: Story) -> Iterator[Finding]:
    """Steps are 1, 2, 3 ... to the committed one, with rising versions; a run that succeeded trained its last batch."""
    evidence = story.evidence
    steps = [record["step"] for record in evidence.steps]
    if steps != list(range(1, len(steps) + 1)):
        yield Finding(Kind.HISTORY, "steps", f"{steps} are not 1 to {len(steps)}")
    versions = [record["version"] for record in evidence.steps]
    if any(later <= earlier for earlier, later in pairwise(versions)):
        yield Finding(Kind.HISTORY, "versions", f"{versions} do not rise")
    if steps and (int(evidence.policy["step"]), int(evidence.policy["version"])) != (steps[-1], versions[-1]):
        yield Finding(Kind.HISTORY, "policy", f"{evidence.policy} does not match the last step")
    last = next((step for step, batch in story.batches.items() if batch["last"]), None)
    if evidence.state == "succeeded" and (not steps or steps[-1] != last):
        yield Finding(Kind.HISTORY, "steps", f"the run succeeded after step {steps[-1:]}, but its last step is {last}")


def steps_train_their_batches(story: Story) -> Iterator[Finding]:
    """A step's groups are those of its published batch, its archived batch and its record on disk."""
    evidence = story.evidence
    covered = max(evidence.checkpoints, default=0)
    for record in evidence.steps:
        step, groups = record["step"], list(record["groups"])
        where = f"step {step}"
        published = story.batches.get(step)
        if published is None or _names(published) != groups:
            yield Finding(Kind.HISTORY, where, "its groups differ from those of its published batch")
        archived = evidence.archive.get(step)
        if archived is None and step > covered:
            yield Finding(Kind.ARCHIVE, where, "its batch is not archived, and no checkpoint covers the step")
        if archived is not None and published is not None and (why := _differs(story, archived, published)):
            yield Finding(Kind.ARCHIVE, where, f"the archived batch differs from the published one: {why}")
        written = evidence.records.get(step)
        if written is None:
            yield Finding(Kind.ARCHIVE, where, "the run's folder has no record of it")
        elif any(written[name] != record[name] for name in ("step", "version", "groups", "epoch", "owner")):
            yield Finding(Kind.ARCHIVE, where, "its record in the run's folder differs from the one in the stream")


def _differs(story: Story, archived: dict[str, Any], published: dict[str, Any]) -> str | None:
    """How an archived batch differs; None if it does not. Samples with a damaged payload are masked in it."""
    damages = [event["text"] for event in story.evidence.bodies("events") if event["phase"] == DAMAGED]
    archived = deepcopy(archived)
    for group, original in zip(archived["groups"], published["groups"], strict=False):
        for sample, whole in zip(group["samples"], original["samples"], strict=False):
            if sample["masked"] and not whole["masked"] and any(sample["payload"] in text for text in damages):
                sample["masked"] = False
    return None if archived == published else "other groups, samples or masks"


def _names(batch: dict[str, Any]) -> list[str]:
    return [group["group"] for group in batch["groups"]]


def payloads_are_archived_once(story: Story) -> Iterator[Finding]:
    """The archived shares of a step hold each response that enters the loss exactly once, and no other response."""
    for step, batch in story.evidence.archive.items():
        wanted = sorted(
            (sample["payload"], group["group"])
            for group in batch["groups"]
            for sample in group["samples"]
            if sample["tokens"] and not sample["masked"]
        )
        found = sorted(story.evidence.shares.get(step, []))
        if found != wanted:
            text = f"{len(found)} payloads ({len(set(found))} different) are archived, but its batch has {len(wanted)}"
            yield Finding(Kind.ARCHIVE, f"step {step}", text)


def staleness_is_kept(story: Story) -> Iterator[Finding]:
    """No response exceeded limits.max_staleness when it was trained, and the batch states its staleness.

    Staleness counts rollout steps. A version between those of two committed steps was published again for the first, or
    for the second by a learner that died before its commit: its samples may be of either.
    """
    bound = story.evidence.recipe["limits"]["max_staleness"]
    committed: list[tuple[int, int]] = [(0, 0)]
    for record in story.evidence.steps:
        batch, step = story.batches.get(record["step"]), record["step"]
        for group in batch["groups"] if batch else ():
            for sample in group["samples"]:
                oldest = _oldest(story, sample["payload"])
                where = f"step {step}"
                if oldest is None:
                    yield Finding(Kind.HISTORY, where, f"{sample['payload']} was trained without a verdict")
                    continue
                possible = [step - 1 - of_step for of_step in _steps_of(oldest, committed, step)]
                if min(possible) > bound:
                    text = (
                        f"{sample['payload']} of version {oldest} has a staleness of {possible}; the bound is {bound}"
                    )
                    yield Finding(Kind.STALENESS, where, text)
                elif sample["staleness"] not in possible:
                    text = f"{sample['payload']} has staleness {sample['staleness']}: expected one of {possible}"
                    yield Finding(Kind.STALENESS, where, text)
        committed.append((record["version"], step))


def _steps_of(version: int, committed: list[tuple[int, int]], trained_in: int) -> list[int]:
    """The rollout steps whose weights a version may carry, from the committed (version, step), in order."""
    later = next((step for known, step in committed if known >= version), trained_in)
    earlier = max(step for known, step in committed if known <= version)
    return sorted({earlier, later})


def _oldest(story: Story, payload: str) -> int | None:
    match = PAYLOAD.search(payload)
    if match is None:
        return None
    verdict = story.judged.get(match["group"], {}).get(int(match["index"]))
    return None if verdict is None else int(verdict["facts"]["oldest_version"])


def evaluations_are_complete(story: Story) -> Iterator[Finding]:
    """In the surviving history an evaluation is recorded once, and answers or drops every prompt dispatched for it."""
    dispatched: dict[tuple[str, str], int] = {}
    for name in story.dispatched("evaluation"):
        _, which, when, _ = name.split(".")
        dispatched[which, when] = dispatched.get((which, when), 0) + 1
    seen = set()
    for record in story.evidence.evaluations:
        evaluation = (record["set"], record["name"])
        if evaluation in seen:
            yield Finding(Kind.DUPLICATED, " ".join(evaluation), "evaluated more than once")
        seen.add(evaluation)
        expected = dispatched.get(evaluation, 0)
        if record["prompts"] + record["dropped"] != expected:
            text = f"{expected} prompts were dispatched, {record['prompts']} answered, {record['dropped']} dropped"
            yield Finding(Kind.COUNTERS, " ".join(evaluation), text)
