"""Owns which samples a search wants, and the place at which it goes on.

Must not read files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple, Self

from pydantic import Field

from services.contracts import Lane, Outcome, Value
from services.storage.groups.parts import of_evaluation
from services.storage.groups.story import ArchivedSample

CURSOR = re.compile(r"(?P<at_ms>\d{1,16})\.(?P<sample>\d{1,6})\.(?P<group>[A-Za-z0-9.-]{1,100})")


class SampleFilter(Value):
    """Which samples a search wants; what is None or "" does not matter.

    `reward`: the name of a reward, whose score `least` and `most` limit, inclusive; "": the verdict's score.
    `version`: a policy version that wrote a token of the sample. `step`: the rollout step that trained it. `text`: a
    part of the response, upper and lower case being equal. `release`: trained, filtered, stale, dead or evaluated.
    """

    outcome: Outcome | None = None
    reward: Annotated[str, Field(max_length=64)] = ""
    least: float | None = None
    most: float | None = None
    step: int | None = None
    version: int | None = None
    lane: Lane | None = None
    release: Annotated[str, Field(max_length=16)] = ""
    evaluation: Annotated[str, Field(max_length=64)] = ""
    set: Annotated[str, Field(max_length=64)] = ""
    prompt: Annotated[str, Field(max_length=1024)] = ""
    text: Annotated[str, Field(max_length=1024)] = ""

    def limits(self) -> dict[str, Any]:
        """The columns of a group that must have one value: files and row groups without it need not be read."""
        named = {"step": self.step, "lane": self.lane, "prompt_id": self.prompt or None}
        return {name: value for name, value in named.items() if value is not None}

    def wants_group(self, row: Mapping[str, Any]) -> bool:
        """Whether the samples of a group may be wanted. `row`: its columns."""
        fields = {"release": self.release, "evaluation": self.evaluation, "set": self.set}
        same = {name: value for name, value in fields.items() if value} | self.limits()
        return all(row[name] == value for name, value in same.items())

    def wants(self, sample: Mapping[str, Any]) -> bool:
        """Whether a sample of a wanted group is wanted."""
        return all(check(self, sample) for check in CHECKS)


def _outcome(wanted: SampleFilter, sample: Mapping[str, Any]) -> bool:
    return wanted.outcome is None or sample["outcome"] == wanted.outcome


def _score(wanted: SampleFilter, sample: Mapping[str, Any]) -> bool:
    if wanted.least is None and wanted.most is None:
        return not wanted.reward or wanted.reward in sample["rewards"]
    score = sample["rewards"].get(wanted.reward) if wanted.reward else sample["score"]
    if score is None:
        return False
    return (wanted.least is None or score >= wanted.least) and (wanted.most is None or score <= wanted.most)


def _version(wanted: SampleFilter, sample: Mapping[str, Any]) -> bool:
    if wanted.version is None:
        return True
    if sample["spans"]:
        return any(span["version"] == wanted.version for span in sample["spans"])
    oldest, newest = sample["oldest_version"], sample["newest_version"]
    return oldest is not None and newest is not None and oldest <= wanted.version <= newest


def _text(wanted: SampleFilter, sample: Mapping[str, Any]) -> bool:
    return not wanted.text or wanted.text.casefold() in (sample["text"] or "").casefold()


CHECKS: tuple[Callable[[SampleFilter, Mapping[str, Any]], bool], ...] = (_outcome, _score, _version, _text)
"""Cheap ones first."""


class SearchPlace(NamedTuple):
    """After which sample a search goes on. Training groups come before evaluation groups, the last archived first."""

    at_ms: int
    group: str
    sample: int

    @property
    def order(self) -> tuple[bool, int, str, int]:
        """The sort key."""
        return of_evaluation(self.group), -self.at_ms, self.group, self.sample

    @classmethod
    def parse(cls, cursor: str) -> Self:
        """The place of a cursor. Raises ValueError, which names it."""
        match = CURSOR.fullmatch(cursor)
        if match is None:
            raise ValueError(f"cursor: {cursor[:100]!r} is not valid: expected the cursor of the previous answer")
        return cls(int(match["at_ms"]), match["group"], int(match["sample"]))

    @property
    def cursor(self) -> str:
        """The reverse of `parse`."""
        return f"{self.at_ms}.{self.sample}.{self.group}"


class FoundSample(ArchivedSample):
    """A sample that a search found, and its group. `step`, `version` and the others: see ArchivedGroup."""

    group: str
    lane: Lane
    resumption: int
    release: str
    evaluation: str
    set: str
    step: int | None
    version: int | None
    archived_ms: int
    prompt_id: str | None


class SamplePage(Value):
    """The samples that a search found, and the cursor with which it goes on; None: there are no more.

    A page may be empty and have a cursor: one call reads a bounded number of rows. `groups`: how many it read.
    `damaged`: the files that it skipped, each with what is wrong.
    """

    samples: tuple[FoundSample, ...]
    cursor: str | None
    groups: int
    damaged: tuple[str, ...] = ()
