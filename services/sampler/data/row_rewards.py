"""Owns the rewards of rows: which ones the rows of a source may use, and what reference each of them needs.

Must not judge, nor try a reference; the verifier's program does.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from services.sampler.data.rows import DataError, Row, excerpt
from services.settings import Recipe, SourceSettings
from services.settings.faults import invalid
from services.settings.rewards.confined import BUILT_IN, MOST_FUNCTIONS, MOST_ROW_FUNCTIONS, confined_functions
from services.settings.rewards.files import expected_function
from services.settings.rewards.kinds import PythonReward
from services.settings.rewards.reward import (
    COMBINATIONS,
    FORMS,
    MOST_TEXT,
    Document,
    Reward,
    RewardError,
    RewardNames,
    parse_reward,
    parse_text,
)

REFERENCES: Mapping[str, tuple[str, ...]] = {
    "math": ("answer",),
    "answer-line": ("answer",),
    "pattern": ("pattern",),
    "reasoning-gym": ("task", "entry"),
    "python": (),
    "http": (),
    "judge": (),
    "code": (),
}
"""By kind of reward: the fields that its reference needs. With none it may be any object."""

ANSWER = "answer"
"""The field that a bare answer becomes, unless a single reward needs another one."""

CACHED = 1024  # rewards per source; rows of a file mostly share a few
SHOWN_FAULT = 600  # characters


@dataclass(frozen=True)
class RowReward:
    """The reward of a row: its text in messages, the fields that the reference needs, and that of a bare answer."""

    text: str
    needed: tuple[str, ...]
    bare: str

    @property
    def takes_any_answer(self) -> bool:
        """Whether a bare answer may be any JSON value, because only rewards of the user's own read it."""
        return not self.needed


class SourceRewards:
    """The rewards that the rows of one source may use: built-in ones, and what its recipe names.

    `own` is the source's own reward; `files`: see RowRewards. Raises RewardError if the recipe's names cannot resolve
    it.
    """

    def __init__(
        self, source: SourceSettings, names: RewardNames, known: Collection[str], files: Mapping[str, str | None]
    ) -> None:
        self.source = source
        self._names = names
        self._files = files
        own = names.resolved(parse_reward(source.verifier))
        self._known = frozenset(known).union(single.text for single in own.singles)
        self.own = _row_reward(own)
        self._of_text = lru_cache(CACHED)(self._accepted)

    def of_row(self, row: Row, field: str) -> RowReward:
        """The reward that a row names at `field`. Raises DataError if it is not valid, or not one for rows."""
        value = row.get(field)
        try:
            return self._of_text(_text(value))
        except RecursionError:
            raise row.fault(field, f"{type(value).__name__} is not valid: expected fewer levels of nesting") from None
        except RewardError as error:
            raise row.fault(field, self._explained(str(error))) from None

    def _accepted(self, text: str) -> RowReward:
        reward = self._names.resolved(parse_text(text))
        for single in reward.singles:
            if not self._may_use(single):
                raise RewardError(f"verifier: {excerpt(single.text)} is not valid: expected {FORMS}")
            if expected := self._expected_function(single):
                raise RewardError(f"verifier: {excerpt(single.text)} is not valid: expected {expected}")
        return _row_reward(reward)

    def _may_use(self, single: Reward) -> bool:
        if single.kind in BUILT_IN or single.text in self._known:
            return True
        options = single.options
        # Without `needs`: what needs the network or files runs in pods that exist only for rewards of the recipe.
        return isinstance(options, PythonReward) and not options.needs and options.file in self._files

    def _expected_function(self, single: Reward) -> str:
        """What is expected in place of a function that its file does not define; "" if it may define it."""
        options = single.options
        if not isinstance(options, PythonReward) or options.file is None:
            return ""
        text = self._files.get(options.file)
        return "" if text is None else expected_function(options.file, options.function.rpartition(":")[2], text)

    def _explained(self, text: str) -> str:
        """An error of a reward for rows, which may use fewer than a recipe."""
        offending, found, _ = text.removeprefix("verifier: ").rpartition(f" is not valid: expected {FORMS}")
        if found:
            return f"{_cut(offending)} is not valid: expected {self.accepted}"
        return _cut(text.removeprefix("verifier: "))

    @property
    def accepted(self) -> str:
        """What a row may name, after the word "expected"."""
        names = f", {', '.join(self._names.names)} (of verifier.rewards)" if self._names.names else ""
        return (
            f"one of {', '.join(BUILT_IN)}{names}, with options or combined by {', '.join(COMBINATIONS)}; "
            "another reward only if verifier.rewards or the source's verifier has it, or a function of verifier.files"
        )


class RowRewards:
    """The rewards that a recipe offers to the rows of its sources. Without arguments: the built-in ones alone.

    `files`: those whose functions rows may name, by name (`./rewards.py`), with their texts. Where the text is None,
    whether a function exists is not looked at.
    """

    def __init__(
        self, rewards: Mapping[str, Document] | None = None, files: Mapping[str, str | None] | None = None
    ) -> None:
        self._names = RewardNames(rewards or {})
        self._known = self._names.texts
        self._files = files or {}

    @classmethod
    def of(cls, recipe: Recipe, texts: Mapping[str, str]) -> RowRewards:
        """Those of a recipe. `texts`: of the user's files, by name, as far as they are known."""
        return cls(recipe.verifier.rewards, {name: texts.get(name) for name in recipe.verifier.files})

    def of_source(self, source: SourceSettings, where: str) -> SourceRewards:
        """Those of one of its sources; `where` is the source's section in errors. Raises DataError."""
        try:
            return SourceRewards(source, self._names, self._known, self._files)
        except RewardError as error:
            raise DataError(f"{where}.{error}") from None


def row_functions(recipe: Recipe, verifiers: Iterable[str]) -> tuple[str, ...]:
    """The confined functions of the user's that rewards of rows use, and none of the recipe's own; no repetition.

    `verifiers`: the rewards of prompts. Raises DataError if there are more than MOST_ROW_FUNCTIONS, or more than
    MOST_FUNCTIONS together with the recipe's.
    """
    own = {single.text for single in confined_functions(recipe.rewards)}
    named = (single.text for single in confined_functions(map(parse_text, dict.fromkeys(verifiers))))
    found = tuple(text for text in dict.fromkeys(named) if text not in own)
    most = min(MOST_ROW_FUNCTIONS, MOST_FUNCTIONS - len(own))
    if len(found) > most:
        beside = f", because the recipe has {len(own)} of its own" if most < MOST_ROW_FUNCTIONS else ""
        expected = f"rows that name at most {most} different functions of verifier.files{beside}"
        raise DataError(invalid("data", len(found), expected))
    return found


def _row_reward(reward: Reward) -> RowReward:
    needed = tuple(dict.fromkeys(name for single in reward.singles for name in REFERENCES[single.kind]))
    bare = needed[0] if needed and not reward.parts else ANSWER
    return RowReward(reward.text, needed, bare)


def _text(value: Any) -> str:
    """A row's reward as text: itself, or the JSON of an object. Raises RewardError."""
    if isinstance(value, Mapping):
        try:
            value = json.dumps(_without_nulls(value), separators=(",", ":"))
        except (TypeError, ValueError):
            raise RewardError(f"verifier: {excerpt(value)} is not valid: expected an object of JSON values") from None
    elif not isinstance(value, str):
        raise RewardError(f"verifier: {excerpt(value)} is not valid: expected {FORMS}")
    text: str = value.strip()
    if len(text) > MOST_TEXT:
        raise RewardError(f"verifier: {excerpt(text)} is not valid: expected at most {MOST_TEXT} characters")
    return text


def _without_nulls(value: Any) -> Any:
    """The value without the nulls of its objects: a column of objects has the fields of all rows in each row.

    An object of one field keeps it: `{math: null}` is `math`.
    """
    if isinstance(value, list | tuple):
        return [_without_nulls(entry) for entry in value]
    if not isinstance(value, Mapping):
        return value
    kept = {name: _without_nulls(entry) for name, entry in value.items() if entry is not None}
    return kept or dict(value)


def _cut(text: str) -> str:
    half = SHOWN_FAULT // 2
    return text if len(text) <= SHOWN_FAULT else f"{text[:half]} ... {text[-half:]}"
