"""Owns a reward as recipes and rows write it: a name, a short form, a mapping, or a combination of others.

Must not read a file, nor judge.

    math                                   a built-in verifier
    {math: {last_number: true}}            with options
    python:./rewards.py:score              a function of a file beside the recipe, or python:package.module:score
    https://rewards.internal/score         a service
    {all: [math, python:./rewards.py:f]}   a combination: all, any, weighted
    mine                                   what `verifier.rewards` calls so
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationError

from services.settings.base import Section
from services.settings.faults import explained, invalid, shown
from services.settings.rewards.kinds import KINDS, SHORT, JudgeReward, PythonReward, RemoteReward

COMBINATIONS = ("all", "any", "weighted")
NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,38}[a-z0-9])?")
MOST_PARTS, MOST_LEVELS, MOST_NAMES, MOST_TEXT = 16, 4, 32, 8192
FORMS = (
    f"a verifier ({', '.join(kind for kind in KINDS if kind not in {*SHORT, 'judge'})}), a name of verifier.rewards, "
    "python:..., http(s)://..., or a mapping of one kind to its options"
)

Document = str | dict[str, Any]


class RewardError(ValueError):
    """A reward that is not valid. One line: what, its value, what is expected."""


@dataclass(frozen=True)
class RewardPart:
    """One reward of a combination, by the name of its metrics. `weight`: of its score among those of all parts."""

    name: str
    reward: Reward
    weight: float = 1.0


@dataclass(frozen=True)
class Reward:
    """A reward that has been checked. `options`: of a single one; `parts`: of a combination.

    kind '' is a name that only a recipe's `verifier.rewards` can resolve: `name`.
    """

    kind: str
    options: Section | None = None
    parts: tuple[RewardPart, ...] = ()
    name: str = ""

    @property
    def document(self) -> Document:
        """As a recipe may write it, in its shortest form."""
        if not self.kind:
            return self.name
        if self.parts:
            return {self.kind: list(_part_documents(self.kind, self.parts))}
        given = self.options.model_dump(mode="json", exclude_defaults=True) if self.options else {}
        if list(given) == [SHORT.get(self.kind)]:
            [short] = given.values()
            return f"python:{short}" if self.kind == "python" else str(short)
        return {self.kind: given} if given else self.kind

    @property
    def text(self) -> str:
        """The document as messages carry it: itself if it is a text, else as JSON. `parse_text` reads it."""
        document = self.document
        return document if isinstance(document, str) else json.dumps(document, separators=(",", ":"), sort_keys=True)

    @property
    def singles(self) -> tuple[Reward, ...]:
        """Itself, or all the single rewards that it combines."""
        return tuple(single for part in self.parts for single in part.reward.singles) if self.parts else (self,)

    @property
    def files(self) -> tuple[str, ...]:
        """The files beside the recipe that it uses, such as `./rewards.py`."""
        return tuple(dict.fromkeys(name for single in self.singles for name in _files(single)))

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts that it sends requests to."""
        found = (single.options.host for single in self.singles if isinstance(single.options, RemoteReward))
        return tuple(dict.fromkeys(found))


def _files(single: Reward) -> Iterator[str]:
    if isinstance(single.options, PythonReward) and single.options.file:
        yield single.options.file
    if isinstance(single.options, JudgeReward):
        yield single.options.rubric


def _part_documents(kind: str, parts: tuple[RewardPart, ...]) -> Iterator[Document]:
    """The parts as `_parts` reads them: with their names and weights, or, if it gives the same name, only the reward.

    A part that was named in `verifier.rewards` keeps this name once it has been resolved.
    """
    taken = set[str]()
    for part in parts:
        if kind == "weighted":
            yield {"name": part.name, "verifier": part.reward.document, "weight": part.weight}
        elif part.name == _free_name(part.reward, taken):
            yield part.reward.document
        else:
            yield {"name": part.name, "verifier": part.reward.document}
        taken.add(part.name)


def parse_reward(document: Any, level: int = 1) -> Reward:
    """A reward from plain data. Raises RewardError."""
    if isinstance(document, str):
        return _from_text(document)
    if not isinstance(document, Mapping) or len(document) != 1:
        raise RewardError(invalid("verifier", document, FORMS))
    [(kind, given)] = document.items()
    if kind in COMBINATIONS:
        _check_level(kind, level)
        return Reward(kind, parts=_parts(kind, given, level))
    if kind not in KINDS:
        raise RewardError(invalid("verifier", kind, FORMS))
    if isinstance(given, str) and kind in SHORT:
        given = {SHORT[kind]: given}
    return Reward(kind, _options(kind, {} if given is None else given))


@lru_cache(maxsize=256)
def parse_text(text: str) -> Reward:
    """A reward from its text, as messages carry it. Raises RewardError."""
    if not text.startswith("{"):
        return parse_reward(text)
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        raise RewardError(invalid("verifier", text[:80], FORMS)) from None
    return parse_reward(document)


def _check_level(kind: str, level: int) -> None:
    if level > MOST_LEVELS:
        raise RewardError(invalid("verifier", kind, f"at most {MOST_LEVELS} combinations inside each other"))


def _from_text(text: str) -> Reward:
    if text.startswith(("http://", "https://")):
        return Reward("http", _options("http", {"url": text}))
    kind, colon, rest = text.partition(":")
    if colon and kind in SHORT:
        return Reward(kind, _options(kind, {SHORT[kind]: rest}))
    if text in KINDS:
        return Reward(text, _options(text, {}))
    if NAME.fullmatch(text):
        return Reward("", name=text)
    raise RewardError(invalid("verifier", text, FORMS))


def _options(kind: str, given: Any) -> Section:
    try:
        return KINDS[kind].model_validate(given)
    except ValidationError as error:
        raise RewardError("; ".join(_fault(kind, dict(fault)) for fault in error.errors())) from None


def _fault(kind: str, error: dict[str, Any]) -> str:
    where = ".".join([kind, *map(str, error["loc"])])
    if error["type"] == "value_error":  # from a validator of ours, whose text names the field
        return f"{kind}.{str(error['msg']).removeprefix('Value error, ')}"
    return explained(where, error)


def _parts(kind: str, given: Any, level: int) -> tuple[RewardPart, ...]:
    if not isinstance(given, list | tuple) or not 1 <= len(given) <= MOST_PARTS:
        raise RewardError(invalid(kind, given, f"a list of 1 to {MOST_PARTS} rewards"))
    parts, taken = [], set[str]()
    for entry in given:
        named = kind == "weighted" or (isinstance(entry, Mapping) and "verifier" in entry)
        fields = _part_fields(kind, entry) if named else {"verifier": entry}
        reward = parse_reward(fields["verifier"], level + 1)
        name = fields["name"] if "name" in fields else _free_name(reward, taken)
        if name in taken:
            raise RewardError(invalid(f"{kind}.name", name, "names that differ"))
        taken.add(name)
        parts.append(RewardPart(name, reward, float(fields.get("weight", 1.0))))
    return tuple(parts)


def _part_fields(kind: str, entry: Any) -> Mapping[str, Any]:
    """A part of a combination that is written with its name or weight."""
    known = {"verifier", "weight", "name"} if kind == "weighted" else {"verifier", "name"}
    if not isinstance(entry, Mapping) or "verifier" not in entry or not known.issuperset(entry):
        expected = "a list of {verifier, weight, name}, of which only the first is needed"
        raise RewardError(invalid(kind, entry, expected if kind == "weighted" else "rewards, or {verifier, name}"))
    weight, name = entry.get("weight", 1.0), entry.get("name")
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight <= 1e6:
        raise RewardError(invalid(f"{kind}.weight", weight, "a number above 0, at most 1000000"))
    if "name" in entry and not (isinstance(name, str) and NAME.fullmatch(name)):
        raise RewardError(invalid(f"{kind}.name", name, "at most 40 of a-z, 0-9 and -"))
    return entry


def _free_name(reward: Reward, taken: set[str]) -> str:
    """The name of a part that has none, with a number if it is taken."""
    base = name = _default_name(reward)
    number = 2
    while name in taken:
        name, number = f"{base[:36]}-{number}", number + 1
    return name


def _default_name(reward: Reward) -> str:
    """The name of a part that has none: its own name, its function's, or its kind."""
    if isinstance(reward.options, PythonReward):
        found = reward.options.function.rpartition(":")[2].lower().replace("_", "-").strip("-")[:38].strip("-")
        return found or reward.kind
    return reward.name or reward.kind


def _canonical(document: Any) -> Document:
    return _bounded(parse_reward(document)).document


def _bounded(reward: Reward) -> Reward:
    """The same reward. Raises RewardError if messages would get too long with it."""
    if len(text := reward.text) > MOST_TEXT:
        raise RewardError(invalid("verifier", f"{text[:80]}...", f"at most {MOST_TEXT} characters as JSON"))
    return reward


RewardSetting = Annotated[Document, BeforeValidator(_canonical), Field(description=f"A reward: {FORMS}.")]
"""The type of a setting that holds a reward; its value is the reward's document."""


class RewardNames:
    """The rewards of a recipe by name, which recipes and rows may use as those of other rewards."""

    def __init__(self, documents: Mapping[str, Document]) -> None:
        self._rewards = {name: parse_reward(document) for name, document in documents.items()}

    @property
    def names(self) -> tuple[str, ...]:
        """The names."""
        return tuple(self._rewards)

    def resolved(self, reward: Reward, through: tuple[str, ...] = (), level: int = 1) -> Reward:
        """The reward with each name replaced by what it stands for.

        Raises RewardError: an unknown or circular name, or a reward that is too large with what its names stand for.
        """
        if reward.parts:
            # Both limits hold for the whole, because messages carry it. They also end the expansion of a few short
            # rewards that name each other many times.
            _check_level(reward.kind, level)
            resolved = (self.resolved(part.reward, through, level + 1) for part in reward.parts)
            parts = tuple(RewardPart(p.name, found, p.weight) for p, found in zip(reward.parts, resolved, strict=True))
            return _bounded(Reward(reward.kind, parts=parts))
        if reward.kind:
            return reward
        if reward.name not in self._rewards:
            known = f"; verifier.rewards has {', '.join(self._rewards)}" if self._rewards else ""
            raise RewardError(invalid("verifier", reward.name, f"{FORMS}{known}"))
        if reward.name in through:
            raise RewardError(
                invalid("verifier", reward.name, f"a reward that does not contain itself: {shown(through)}")
            )
        if len(through) == MOST_NAMES:
            raise RewardError(
                invalid("verifier", through[0], f"at most {MOST_NAMES} names, each standing for the next")
            )
        return self.resolved(self._rewards[reward.name], (*through, reward.name), level)

    @property
    def texts(self) -> frozenset[str]:
        """The texts of all single rewards that the recipe names: those that a row may use besides built-in ones."""
        found = (self.resolved(reward) for reward in self._rewards.values())
        return frozenset(single.text for reward in found for single in reward.singles)
