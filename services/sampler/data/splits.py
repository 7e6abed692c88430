"""Owns the splits of a run's prompts: each question occurs once, and no evaluated question is trained.

Must not read files or word prompts itself.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from services.contracts import Prompt
from services.sampler.data.formats import FORMATS
from services.sampler.data.layouts import Item
from services.sampler.data.overlap import normalised, shared
from services.sampler.data.rows import DataError, excerpt
from services.sampler.data.sources import items
from services.settings import DataSettings, EvaluationSet, SourceSettings


@dataclass(frozen=True)
class DataReport:
    """What happened to the rows of `data`. rows = distinct + duplicates; `conflicts`: duplicates with another answer.

    `contaminated`: questions removed from training because an evaluation set has them.
    """

    rows: int
    distinct: int
    conflicts: int
    contaminated: int
    train: int
    held_out: int
    sets: dict[str, int]

    @property
    def duplicates(self) -> int:
        """The number of rows whose question was in an earlier row."""
        return self.rows - self.distinct

    @property
    def text(self) -> str:
        """The report in one line."""
        sets = "".join(f", {count} in set {name!r}" for name, count in self.sets.items())
        return (
            f"{self.rows} rows, {self.distinct} distinct questions, {self.duplicates} duplicates removed "
            f"({self.conflicts} of them with another answer; the first is kept), {self.contaminated} removed from "
            f"training because an evaluation set has them: {self.train} to train on, {self.held_out} held out{sets}"
        )


@dataclass(frozen=True)
class Splits:
    """Training prompts, held-out prompts, and evaluation sets by name. No training question is in another part."""

    train: tuple[Prompt, ...]
    held_out: tuple[Prompt, ...]
    sets: dict[str, tuple[Prompt, ...]]
    report: DataReport


@dataclass
class _Gathered:
    """The distinct questions of a source by normalised text, in the order of their first rows."""

    rows: int = 0
    conflicts: int = 0
    prompts: dict[str, Prompt] = field(default_factory=dict)
    golds: dict[str, Any] = field(default_factory=dict)

    def add(self, source: SourceSettings, where: str, item: Item) -> None:
        """Add the question of a row, unless an earlier row had it."""
        self.rows += 1
        key = normalised(" ".join(message["content"] for message in item.messages))
        if key not in self.prompts:
            self.prompts[key] = _prompt(source, where, self.rows, item)
            self.golds[key] = item.gold
        elif self.golds[key] != item.gold:
            self.conflicts += 1


def _gather(source: SourceSettings, where: str, wanted: int | None) -> _Gathered:
    """The distinct questions of a source: the first `wanted`, or all if it is None."""
    found = _Gathered()
    for row in items(source, where, wanted):
        found.add(source, where, row)
        if len(found.prompts) == wanted:
            break
    return found


def _prompt(source: SourceSettings, where: str, number: int, item: Item) -> Prompt:
    *before, question = item.messages
    content = FORMATS[source.prompt_format](question["content"]) + source.suffix
    messages = [*before, {"role": "user", "content": content}]
    if source.system_prompt is not None:
        if any(message["role"] == "system" for message in messages):
            shown_prompt = excerpt(source.system_prompt)
            raise DataError(
                f"{where}.system_prompt: {shown_prompt} is not valid: expected null, "
                f"because row {number} has its own system message"
            )
        messages.insert(0, {"role": "system", "content": source.system_prompt})
    return Prompt(id=f"p{number:06d}", messages=tuple(messages), verifier=item.verifier, reference=item.reference)


def _where(source: SourceSettings) -> str:
    return f"evaluation.sets {source.name!r}" if isinstance(source, EvaluationSet) else "data"


def load_set(source: SourceSettings, wanted: int | None) -> tuple[Prompt, ...]:
    """The first `wanted` distinct questions of a source (None: all), in its order.

    Raises DataError if the source has fewer, or none.
    """
    return tuple(_gathered_set(source, wanted).prompts.values())


def _gathered_set(source: SourceSettings, wanted: int | None) -> _Gathered:
    found = _gather(source, _where(source), wanted)
    if not found.prompts:
        raise DataError(f"{_where(source)}.path: {source.path!r} is not valid: expected at least one question")
    if len(found.prompts) < (wanted or 0):
        raise DataError(
            f"{_where(source)}.prompts: {wanted} is not valid: expected at most {len(found.prompts)},"
            " the number of distinct questions in the source"
        )
    return found


def load_splits(data: DataSettings, sets: tuple[EvaluationSet, ...] = ()) -> Splits:
    """All prompts of a run; the training and held-out prompts are shuffled by `data.seed`.

    Raises DataError if a source has too few distinct questions. Blocks while the files are read.
    """
    loaded = {settings.name: _gathered_set(settings, settings.prompts) for settings in sets}
    evaluated = {key for gathered in loaded.values() for key in gathered.prompts}
    generated = None if data.train is None or data.path else data.train + data.held_out
    # A generated source provides one spare question per evaluated one. The spare questions come last, so that the
    # held-out split does not depend on the evaluation sets.
    found = _gather(data, "data", None if generated is None else generated + len(evaluated))
    keys = list(found.prompts)
    pool = len(keys) if generated is None else generated
    drawn, spare = keys[:pool], keys[pool:]
    random.Random(data.seed).shuffle(drawn)
    held_out, rest = drawn[: data.held_out], [*drawn[data.held_out :], *spare]
    taken = shared(rest, evaluated)
    left = [key for key in rest if key not in taken]
    _check_size(data, len(keys), len(taken), len(left))
    train = tuple(found.prompts[key] for key in left[: data.train])
    report = DataReport(
        rows=found.rows,
        distinct=len(keys),
        conflicts=found.conflicts,
        contaminated=len(taken),
        train=len(train),
        held_out=len(held_out),
        sets={name: len(gathered.prompts) for name, gathered in loaded.items()},
    )
    parts = {name: tuple(gathered.prompts.values()) for name, gathered in loaded.items()}
    return Splits(train, tuple(found.prompts[key] for key in held_out), parts, report)


def _check_size(data: DataSettings, distinct: int, taken: int, left: int) -> None:
    wanted = data.train or 1
    if left >= wanted:
        return
    shared_with_sets = f", {taken} of them in evaluation sets" if taken else ""
    raise DataError(
        f"data.train + data.held_out: {wanted + data.held_out} is not valid: expected at most {distinct - taken},"
        f" because the source has only {distinct} distinct questions{shared_with_sets}"
    )
