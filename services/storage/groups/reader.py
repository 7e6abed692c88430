"""Owns the reading of a run's archive of groups: the story of one group, and the search for samples.

Must not write. It may be read while a sampler writes and merges files: what has been returned once is found again.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from services.contracts import Lane
from services.storage.groups.columns import FACTS, UNTIL_TOKENS, to_story
from services.storage.groups.filters import FoundSample, SampleFilter, SamplePage, SearchPlace
from services.storage.groups.listing import DamagedPartError, GonePartError, PartIndex, PartShelf
from services.storage.groups.parts import GROUP_ID, Part
from services.storage.groups.story import ArchivedSample, GroupStory
from services.storage.mirror import NO_MIRROR, Mirror, run_mirror
from services.storage.places import runs_folder

T = TypeVar("T")

ATTEMPTS = 3
"""Of a read during which files are merged."""
MOST_WORK = 2000
"""Rows that one call of `search` reads. One that it skips by the statistics counts as SKIPPED, a file as OPENED."""
OPENED, SKIPPED = 20.0, 0.01
MOST_SAMPLES = 500
"""Of one page."""
END = 10**6 - 1
"""An index after all samples of a group."""
KEPT = 24
"""Row groups of a file that stay decoded: a merged file is read in the order of time, and each has some of the rows."""
GROUP_FIELDS = tuple(name for name in FoundSample.model_fields if name not in ArchivedSample.model_fields)


class GroupArchive:
    """The archive of one run. Threads may share it. All methods block, and may raise StoreError, OSError."""

    def __init__(self, folder: Path, mirror: Mirror = NO_MIRROR) -> None:
        """`folder`: the run's; with a store (`mirror`), copies of files are cached there."""
        self._shelf = PartShelf(folder, mirror)

    @classmethod
    def of_run(cls, run: str) -> GroupArchive:
        """That of a run of this platform; its indices are cached in it, so keep it. Raises StoreError."""
        return cls(runs_folder() / run, run_mirror(run))

    def find(self, group: str, resumption: int | None = None) -> GroupStory | None:
        """The story of a group: of its last attempt, or of the one under that resumption; None if it is not archived.

        Raises DamagedPartError if a file that may have it cannot be read.
        """
        return self._again(lambda parts: self._find(parts, group, resumption)) if GROUP_ID.fullmatch(group) else None

    def search(self, wanted: SampleFilter, cursor: str = "", limit: int = 50) -> SamplePage:
        """Up to `limit` samples after `cursor`: of training, then of evaluations; of each, those archived last first.

        Raises ValueError for a cursor that no answer had.
        """
        after = SearchPlace.parse(cursor) if cursor else None
        return self._again(lambda parts: _Search(self._shelf, parts, wanted, after, limit).page())

    def _again(self, read: Callable[[list[Part]], T]) -> T:
        """Read, again if files were merged meanwhile."""
        for attempt in range(ATTEMPTS):
            try:
                return read(self._shelf.parts(again=attempt > 0))
            except GonePartError as error:
                gone = error
        raise DamagedPartError(f"{gone}, in {ATTEMPTS} attempts")

    def _find(self, parts: list[Part], group: str, resumption: int | None) -> GroupStory | None:
        rows: dict[int, tuple[int, PartIndex, int]] = {}
        for part in parts:
            if part.may_have(group):
                index = self._shelf.index(part)
                for row in index.rows_of(group):
                    attempt, at_ms = index.resumptions[row], index.archived_ms[row]
                    if attempt not in rows or at_ms >= rows[attempt][0]:
                        rows[attempt] = at_ms, index, row
        wanted = max(rows, default=None) if resumption is None else resumption
        if wanted not in rows:
            return None
        _, index, row = rows[wanted]
        number = _row_group(index, row)
        return to_story(index.read(number).slice(row - index.starts[number], 1), sorted(rows))


def _row_group(index: PartIndex, row: int) -> int:
    return bisect_right(index.starts, row) - 1


class _Search:
    """One call of `search`."""

    def __init__(
        self, shelf: PartShelf, parts: list[Part], wanted: SampleFilter, after: SearchPlace | None, limit: int
    ) -> None:
        self._shelf = shelf
        self._parts = parts
        self._wanted = wanted
        self._after = after
        self._limit = min(MOST_SAMPLES, max(1, limit))
        self._limits = wanted.limits()
        self._work = 0.0
        self._groups = 0
        self._found: list[FoundSample] = []
        self._damaged: list[str] = []

    def page(self) -> SamplePage:
        """The page. Raises GonePartError."""
        last = self._after
        for place, row in self._rows():
            for sample in row.get("samples", ()):
                at = place._replace(sample=sample["index"])
                if self._after is not None and at.order <= self._after.order:
                    continue
                if self._wanted.wants(sample):
                    if len(self._found) == self._limit:
                        return self._answer(last)
                    self._found.append(_found(row, sample))
                last = at
            last = place
            if self._work > MOST_WORK:
                return self._answer(last)
        return self._answer(None)

    def _answer(self, last: SearchPlace | None) -> SamplePage:
        return SamplePage(
            samples=tuple(self._found),
            cursor=last.cursor if last else None,
            groups=self._groups,
            damaged=tuple(self._damaged),
        )

    def _rows(self) -> Iterator[tuple[SearchPlace, dict[str, Any]]]:
        """The rows after the cursor, newest first; {} for one whose samples are not wanted. Its place: its end."""
        lane = self._wanted.lane
        for part in sorted(self._parts, key=lambda part: (part.evaluation, -part.at_ms)):
            if self._is_before(part) or (lane is not None and part.evaluation != (lane is Lane.EVALUATION)):
                continue
            try:
                yield from self._rows_of(part)
            except DamagedPartError as error:
                self._damaged.append(str(error))

    def _is_before(self, part: Part) -> bool:
        """Whether all samples of a file are before the cursor. A merged file may have older rows than its name says."""
        if self._after is None:
            return False
        evaluation, newest, _, _ = self._after.order
        return (part.evaluation, 0 if part.level else -part.at_ms) < (evaluation, newest if not part.level else 0)

    def _rows_of(self, part: Part) -> Iterator[tuple[SearchPlace, dict[str, Any]]]:
        index = self._shelf.index(part)
        self._work += OPENED
        hopeful = [self._may_have(index, number) for number in range(len(index.starts) - 1)]
        read: dict[int, list[dict[str, Any]]] = {}
        rows = sorted(range(len(index.groups)), key=lambda row: (-index.archived_ms[row], index.groups[row]))
        for row in rows:
            end = SearchPlace(index.archived_ms[row], index.groups[row], END)
            if self._after is not None and end.order <= self._after.order:
                continue
            number = _row_group(index, row)
            if not hopeful[number]:
                self._work += SKIPPED
                yield end, {}
                continue
            if number not in read:
                read = {key: read[key] for key in list(read)[1 - KEPT :]}
                read[number] = _documents(index, number)
                self._work += index.starts[number + 1] - index.starts[number]
            self._groups += 1
            document = read[number][row - index.starts[number]]
            wanted = self._wanted.wants_group(document) and not self._superseded(end, index.resumptions[row])
            yield end, document if wanted else {}

    def _may_have(self, index: PartIndex, number: int) -> bool:
        """Whether a row group may have a wanted row, by its statistics."""
        group = index.metadata.row_group(number)
        named = {group.column(at).path_in_schema: group.column(at) for at in range(len(FACTS))}
        for name, value in self._limits.items():
            statistics = named[name].statistics
            if statistics is None:
                continue
            if not statistics.has_min_max:
                if statistics.null_count == group.num_rows:
                    return False
                continue
            if not statistics.min <= value <= statistics.max:
                return False
        return True

    def _superseded(self, place: SearchPlace, resumption: int) -> bool:
        """Whether the attempt was archived again later: the sampler died between the file and Redis."""
        for part in self._parts:
            if part.at_ms > place.at_ms and part.may_have(place.group):
                try:
                    index = self._shelf.index(part)
                except DamagedPartError:
                    continue  # it is reported where its own rows are read
                rows = index.rows_of(place.group)
                if any(index.resumptions[row] == resumption and index.archived_ms[row] > place.at_ms for row in rows):
                    return True
        return False


def _documents(index: PartIndex, number: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = index.read(number, UNTIL_TOKENS).to_pylist()
    for document in found:
        for sample in document["samples"]:
            sample["rewards"] = dict(sample["rewards"] or ())
    return found


def _found(row: dict[str, Any], sample: dict[str, Any]) -> FoundSample:
    return FoundSample.model_validate({**sample, **{name: row[name] for name in GROUP_FIELDS}})
