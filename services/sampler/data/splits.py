"""Owns the splits of a run's prompts: each question occurs once, and no evaluated question is trained.

Must not read files or word prompts itself.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from services.contracts import Prompt
from services.sampler.data.gathering import BadReference, Gathered, gather, remove_bad_references, where_of
from services.sampler.data.overlap import shared
from services.sampler.data.row_rewards import RowRewards
from services.sampler.data.rows import DataError
from services.settings import DataSettings, EvaluationSet, SourceSettings

SHOWN_CAUSES = 3
"""How many causes of bad references the report names per source."""


@dataclass(frozen=True)
class DataReport:
    """What happened to the rows of `data`. rows = distinct + duplicates + those dropped because of their reference.

    `conflicts`: duplicates with another answer. `contaminated`: questions removed from training because an evaluation
    set has them. `bad_references`: by section of the recipe, the rows dropped because of their reference, by cause.
    """

    rows: int
    distinct: int
    conflicts: int
    contaminated: int
    train: int
    held_out: int
    sets: dict[str, int]
    bad_references: dict[str, Counter[str]] = field(default_factory=dict)

    @property
    def duplicates(self) -> int:
        """The number of rows whose question was in an earlier row."""
        return self.rows - self.distinct - self.bad_references.get("data", Counter()).total()

    @property
    def text(self) -> str:
        """The report in one line."""
        sets = "".join(f", {count} in set {name!r}" for name, count in self.sets.items())
        return (
            f"{self.rows} rows, {self.distinct} distinct questions, {self.duplicates} duplicates removed "
            f"({self.conflicts} of them with another answer; the first is kept), {self.contaminated} removed from "
            f"training because an evaluation set has them: {self.train} to train on, {self.held_out} held out{sets}"
            f"{dropped_text(self.bad_references)}"
        )


@dataclass(frozen=True)
class Splits:
    """Training prompts, held-out prompts, and evaluation sets by name. No training question is in another part."""

    train: tuple[Prompt, ...]
    held_out: tuple[Prompt, ...]
    sets: dict[str, tuple[Prompt, ...]]
    report: DataReport


@dataclass(frozen=True)
class EvaluatedPrompts:
    """The prompts of a run that only evaluates: its held-out split, and the evaluation sets by name."""

    held_out: tuple[Prompt, ...]
    sets: dict[str, tuple[Prompt, ...]]
    bad_references: dict[str, Counter[str]]

    @property
    def text(self) -> str:
        """What was loaded, in one line."""
        sets = "".join(f", {len(prompts)} in set {name!r}" for name, prompts in self.sets.items())
        return f"{len(self.held_out)} held out{sets}{dropped_text(self.bad_references)}"


@dataclass(frozen=True)
class ReadSources:
    """The questions of a load's sources, without the rows whose references cannot be read: `tried` of them were tried.

    `sets`: by name. `data` is None if it was not needed.
    """

    data: Gathered | None
    sets: dict[str, Gathered]
    tried: int

    @property
    def all(self) -> tuple[Gathered, ...]:
        """All sources, the run's own data first."""
        return (*([self.data] if self.data else ()), *self.sets.values())

    @property
    def bad(self) -> tuple[BadReference, ...]:
        """All references that cannot be read."""
        return tuple(bad for found in self.all for bad in found.bad)

    @property
    def bad_references(self) -> dict[str, Counter[str]]:
        """The rows that were removed, by section of the recipe and by cause."""
        return {found.where: found.causes for found in self.all if found.bad}

    def settled(self) -> ReadSources:
        """The same, unless a source does not allow its bad references, or has none else. Raises DataError."""
        for found in self.all:
            found.settle()
        for found in self.sets.values():
            _check_set(found)
        return self


def dropped_text(bad_references: dict[str, Counter[str]]) -> str:
    """The rows dropped because of their references, as the end of a report; '' if there are none."""
    sources = [f"{causes.total()} of {where} ({_causes_text(causes)})" for where, causes in bad_references.items()]
    return f"; rows dropped because of their reference: {', '.join(sources)}" if sources else ""


def _causes_text(causes: Counter[str]) -> str:
    named = [f"{count}: {cause}" for cause, count in causes.most_common(SHOWN_CAUSES)]
    others = causes.total() - sum(count for _, count in causes.most_common(SHOWN_CAUSES))
    return "; ".join([*named, *([f"{others}: other causes"] if others else [])])


def read_sources(
    data: DataSettings | None, sets: tuple[EvaluationSet, ...], rewards: RowRewards, *, spare: bool = True
) -> ReadSources:
    """The distinct questions of all sources, their references tried. `spare`: one more question per evaluated one.

    Raises DataError for a row that is not valid, ReferenceTrialError. Blocks while files are read and references tried.
    """
    loaded = {settings.name: gather(settings, where_of(settings), settings.prompts, rewards) for settings in sets}
    found = None
    if data is not None:
        # A generated source provides one spare question per evaluated one. The spare questions come last, so that the
        # held-out split does not depend on the evaluation sets.
        kept = {key for of in loaded.values() for key in list(of.questions)[: _wanted(of.source)]}
        generated = _generated(data)
        wanted = None if generated is None else generated + (len(kept) if spare else 0)
        found = gather(data, where_of(data), wanted, rewards)
    tried = remove_bad_references([*([found] if found else ()), *loaded.values()])
    for gathered in loaded.values():
        gathered.limit(_wanted(gathered.source))
    return ReadSources(found, loaded, tried)


def _wanted(source: SourceSettings) -> int | None:
    return source.prompts if isinstance(source, EvaluationSet) else None


def _generated(data: DataSettings) -> int | None:
    """The number of questions to generate; None for files."""
    return None if data.train is None or data.path else data.train + data.held_out


def load_splits(data: DataSettings, sets: tuple[EvaluationSet, ...] = (), rewards: RowRewards | None = None) -> Splits:
    """All prompts of a run; the training and held-out prompts are shuffled by `data.seed`.

    `rewards`: what the recipe offers to rows; without, built-in rewards only. Raises DataError if a source has too few
    distinct questions, ReferenceTrialError. Blocks while files are read and references tried.
    """
    return split(data, read_sources(data, sets, rewards or RowRewards()).settled())


def load_evaluated(
    data: DataSettings | None, sets: tuple[EvaluationSet, ...], rewards: RowRewards | None = None
) -> EvaluatedPrompts:
    """The prompts of a run that only evaluates; `data` is None if its held-out split is not needed.

    Raises and blocks as `load_splits` does.
    """
    return evaluated_prompts(data, read_sources(data, sets, rewards or RowRewards(), spare=False).settled())


def evaluated_prompts(data: DataSettings | None, sources: ReadSources) -> EvaluatedPrompts:
    """The prompts of a run that only evaluates. Raises DataError if `data` has too few questions."""
    own = split(data, ReadSources(sources.data, {}, sources.tried)).held_out if data and sources.data else ()
    prompts = {name: gathered.prompts for name, gathered in sources.sets.items()}
    return EvaluatedPrompts(own, prompts, sources.bad_references)


def split(data: DataSettings, sources: ReadSources) -> Splits:
    """The splits of sources that have been read, `data` among them. Raises DataError if they have too few questions."""
    found, loaded = sources.data, sources.sets
    assert found is not None, "the caller reads the run's own data"
    kept_out = {key for gathered in loaded.values() for key in gathered.questions}
    generated = _generated(data)
    keys = list(found.questions)
    pool = len(keys) if generated is None else generated
    drawn, spare = keys[:pool], keys[pool:]
    random.Random(data.seed).shuffle(drawn)
    held_out, rest = drawn[: data.held_out], [*drawn[data.held_out :], *spare]
    taken = shared(rest, kept_out)
    left = [key for key in rest if key not in taken]
    _check_size(data, len(keys), len(taken), len(left))
    train = tuple(found.prompt(key) for key in left[: data.train])
    report = DataReport(
        rows=found.rows,
        distinct=len(keys),
        conflicts=found.conflicts,
        contaminated=len(taken),
        train=len(train),
        held_out=len(held_out),
        sets={name: len(gathered.questions) for name, gathered in loaded.items()},
        bad_references=sources.bad_references,
    )
    parts = {name: gathered.prompts for name, gathered in loaded.items()}
    return Splits(train, tuple(found.prompt(key) for key in held_out), parts, report)


def _check_set(found: Gathered) -> None:
    wanted = _wanted(found.source) or 0
    if not found.questions:
        raise DataError(f"{found.where}.path: {found.source.path!r} is not valid: expected at least one question")
    if len(found.questions) < wanted:
        raise DataError(
            f"{found.where}.prompts: {wanted} is not valid: expected at most {len(found.questions)},"
            " the number of distinct questions in the source"
        )


def _check_size(data: DataSettings, distinct: int, taken: int, left: int) -> None:
    wanted = data.train or 1
    if left >= wanted:
        return
    shared_with_sets = f", {taken} of them in evaluation sets" if taken else ""
    raise DataError(
        f"data.train + data.held_out: {wanted + data.held_out} is not valid: expected at most {distinct - taken},"
        f" because the source has only {distinct} distinct questions{shared_with_sets}"
    )
