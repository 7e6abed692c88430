"""Owns the distinct questions of a source with their references, and what happens to references that cannot be read.

Must not read files itself, nor split a source.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.contracts import Prompt
from services.sampler.data.formats import FORMATS
from services.sampler.data.layouts import Item
from services.sampler.data.overlap import normalised
from services.sampler.data.references import request_of, tried
from services.sampler.data.row_rewards import RowRewards
from services.sampler.data.rows import UNSENDABLE, DataError, excerpt
from services.sampler.data.sources import items
from services.settings import EvaluationSet, SourceSettings

log = logging.getLogger(__name__)

LOGGED = 3
"""How many bad references of a source the log shows when they are dropped."""

FAULTY = " is not valid: "
BARE = ("answer", "pattern")


@dataclass(slots=True)
class AnsweredRows:
    """The rows of one question that have the same gold: the first as `item`, the number `first`, and how many."""

    item: Item
    first: int
    rows: int = 1


@dataclass(frozen=True)
class BadReference:
    """A reference that its verifier cannot read. `cause` is the same for all of its kind; `rows`: how many have it."""

    text: str
    cause: str
    rows: int


@dataclass
class Gathered:
    """The distinct questions of a source by normalised text, in the order of their first rows.

    Of each question: the rows by their gold, in the order of the first of each.
    """

    source: SourceSettings
    where: str
    rows: int = 0
    questions: dict[str, dict[bytes, AnsweredRows]] = field(default_factory=dict)
    bad: list[BadReference] = field(default_factory=list)

    def add(self, item: Item) -> None:
        """Add the question of a row."""
        self.rows += 1
        key = normalised(" ".join(message["content"] for message in item.messages))
        known = self.questions.get(key, {})
        first = next(iter(known.values()), None)
        if first and first.item.gold == item.gold:
            first.rows += 1
            return
        try:
            digest = _digest(item)
        except ValueError as error:  # no message can carry its reference
            item = item.unusable(f"{UNSENDABLE} ({error})")
            digest = _digest(item)
        if digest in known:
            known[digest].rows += 1
        else:
            self.questions.setdefault(key, known)[digest] = AnsweredRows(item, self.rows)

    def of_files(self) -> Iterator[tuple[bytes, AnsweredRows]]:
        """All rows that differ in question or reference, with the digest of verifier and reference.

        None of a generated source: its references are the generator's own.
        """
        if not self.source.generated:
            yield from ((digest, rows) for known in self.questions.values() for digest, rows in known.items())

    def remove(self, faults: dict[bytes, str]) -> None:
        """Remove the rows that have no reference, or one that cannot be read, and list them in `bad` by row.

        `faults`: why the references of other rows cannot be read, by digest.
        """
        bad = {digest: fault for digest, rows in self.of_files() if (fault := rows.item.fault or faults.get(digest))}
        found = [(rows, bad[digest]) for digest, rows in self.of_files() if digest in bad]
        self.bad = [_bad_reference(rows, fault) for rows, fault in sorted(found, key=lambda each: each[0].first)]
        if found:
            left = {
                key: {digest: rows for digest, rows in known.items() if digest not in bad}
                for key, known in self.questions.items()
            }
            self.questions = {key: known for key, known in left.items() if known}

    def settle(self) -> None:
        """Raise DataError because of a bad reference, or log that such rows are dropped, as the source says."""
        if not self.bad:
            return
        if self.source.on_bad_reference == "error":
            more = len(self.bad) - 1
            raise DataError(f"{self.bad[0].text}{f' (and {more} more such references)' if more else ''}")
        for bad in self.bad[:LOGGED]:
            log.warning("dropped: %s", bad.text)
        log.warning("%s: dropped %d of %d rows, whose references cannot be read", self.where, self.dropped, self.rows)
        if not self.questions:
            raise DataError(
                f"{self.where}.path: {self.source.path!r} is not valid: expected a reference that can be read, but all "
                f"{self.rows} rows were dropped; the first: {self.bad[0].text}"
            )

    def limit(self, wanted: int | None) -> None:
        """Keep the first `wanted` questions (None: all)."""
        if wanted is not None:
            self.questions = dict(list(self.questions.items())[:wanted])

    def prompt(self, key: str) -> Prompt:
        """The prompt of a question, by its first row."""
        return _prompt(self.source, self.where, next(iter(self.questions[key].values())))

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        """The prompts of all questions."""
        return tuple(map(self.prompt, self.questions))

    @property
    def conflicts(self) -> int:
        """The number of rows that have another gold than the first row of their question."""
        return sum(rows.rows for known in self.questions.values() for rows in list(known.values())[1:])

    @property
    def dropped(self) -> int:
        """The number of rows that were removed."""
        return sum(bad.rows for bad in self.bad)

    @property
    def causes(self) -> Counter[str]:
        """The number of removed rows by cause."""
        found = Counter[str]()
        for bad in self.bad:
            found[bad.cause] += bad.rows
        return found


def gather(source: SourceSettings, where: str, wanted: int | None, rewards: RowRewards) -> Gathered:
    """The distinct questions of a source: the first `wanted`, or all if it is None. Raises DataError.

    All of a file whose bad references are dropped, because later questions then replace earlier ones.
    """
    found = Gathered(source, where)
    all_of_it = source.on_bad_reference == "drop" and not source.generated
    for item in items(source, where, wanted, rewards):
        found.add(item)
        if len(found.questions) == wanted and not all_of_it:
            break
    return found


def where_of(source: SourceSettings) -> str:
    """The section of a source in a recipe, as errors name it."""
    return f"evaluation.sets {source.name!r}" if isinstance(source, EvaluationSet) else "data"


def remove_bad_references(sources: Sequence[Gathered]) -> int:
    """Try every reference once, and remove those that cannot be read; returns how many were tried.

    Blocks. Raises ReferenceTrialError.
    """
    distinct = {digest: rows.item for found in sources for digest, rows in found.of_files() if not rows.item.fault}
    answers = tried(request_of(item.verifier, item.reference) for item in distinct.values())
    faults = {digest: fault for digest, fault in zip(distinct, answers, strict=True) if fault}
    for found in sources:
        found.remove(faults)
    return len(distinct)


def _digest(item: Item) -> bytes:
    """Of verifier and reference; without a reference, of its fault; of a generated question, of its answer.

    Raises ValueError if the reference cannot be sent in messages.
    """
    if item.place is None:
        found = str(item.gold).encode()
    elif item.fault:
        found = f"{excerpt(item.given)}: {item.fault}".encode()  # no JSON: it equals no request
    else:
        found = request_of(item.verifier, item.reference)
    return hashlib.sha256(found).digest()[:16]


def _bad_reference(rows: AnsweredRows, fault: str) -> BadReference:
    item = rows.item
    assert item.place is not None  # only rows of files are tried
    head, _, cause = fault.rpartition(FAULTY)
    about_all_of_it = any(head.startswith(f"reference {name}: ") for name in BARE) and item.given is not item.reference
    more = f" ({rows.rows} rows)" if rows.rows > 1 else ""
    text = f"{excerpt(item.given)}{FAULTY}{cause if about_all_of_it else fault}{more}"
    return BadReference(str(item.place.fault(text)), cause, rows.rows)


def _prompt(source: SourceSettings, where: str, rows: AnsweredRows) -> Prompt:
    item = rows.item
    *before, question = item.messages
    content = FORMATS[source.prompt_format](question["content"]) + source.suffix
    messages: list[dict[str, Any]] = [*before, {"role": "user", "content": content}]
    if source.system_prompt is not None:
        if any(message["role"] == "system" for message in messages):
            shown_prompt = excerpt(source.system_prompt)
            raise DataError(
                f"{where}.system_prompt: {shown_prompt} is not valid: expected null, "
                f"because row {rows.first} has its own system message"
            )
        messages.insert(0, {"role": "system", "content": source.system_prompt})
    return Prompt(
        id=f"p{rows.first:06d}",
        messages=tuple(messages),
        verifier=item.verifier,
        reference=item.reference,
        metadata=item.metadata,
    )
