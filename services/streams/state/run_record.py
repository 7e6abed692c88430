"""Owns what a run's record holds, how it is read from its hash in Redis, and what a change of it sets.

Must not read or change a record.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from typing import Any, TypeVar

from pydantic import ValidationError

from services.contracts import Closing, RunEdit, RunState, Transition
from services.settings import Recipe, SourceSettings
from services.settings.faults import explained

S = TypeVar("S", bound=SourceSettings)
T = TypeVar("T")
D = TypeVar("D")

SHOWN_CHARACTERS = 200
"""Of a damaged field, in messages."""

LEARNING_RATE = "learner.learning_rate"
DEFAULT_PROJECT = "default"
"""The project of a run that names none."""
PROJECT = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
NO_PROJECT = ""
"""Of a record whose project cannot be read: only principals with a role in all projects see it."""
DAMAGED = (ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError)
"""What reading a field that is not as this release writes it may raise."""
MOST_RECORDED = 2**20
"""Which a record may state; what is accepted is far less."""


class UnreadableRunError(RuntimeError):
    """This release cannot read the run's recipe or record; the text names what is wrong, and what can be done."""


def has_work(state: RunState, closing: Closing | None) -> bool:
    """Whether the controller has work for a run."""
    return not state.ended or bool(closing and closing.open)


@dataclass(frozen=True)
class RunRecord:
    """A run in the control plane. `model_path` and `export_path` are set by the controller and the learner.

    `model_path` names the model on every node (see services.storage.models): a folder, `package:NAME`, an address in
    a store with a mark of what it held, or one of the hub with commit and digest. `inputs`: such names of the data that
    the recipe names on the hub, by their text in the recipe. `export_path`: a folder, or an address in a store.
    `stored_recipe`: JSON, of whatever release.

    `resumptions`: how often the run was resumed after it had ended; `resume_step`: the rollout step that the last
    resumption named, None for the last committed one. `closing`: see Closing; `closed_at`: when it was closed so (Unix
    seconds); `delete_files`: a deletion includes the run's files. `place`: where its files are durable (see
    services.storage.mirror); "" of an earlier release, or before it was started. `files`: the files beside the recipe
    that it was submitted with, SHA-256 by name (services.streams.state.rewards.reward_files has their texts).
    `project`: whose roles and quotas apply to it. `priority`: queued runs with a higher one are placed first. `edits`:
    of settings in flight, the oldest first; the recipe has the values after them. `adopted_step`: the
    rollout step from which the first resumption of an adopted run continues. `revision`: how often the record was
    changed. `damage`: by field, why this release cannot read it; the record then has a default in its place.
    """

    id: str
    stored_recipe: bytes
    state: RunState
    rollout_replicas: int
    cancel_requested: bool
    created_at: float
    history: tuple[Transition, ...]
    model_path: str | None
    export_path: str | None
    summary: dict[str, Any] | None
    pause_requested: bool = False
    resumptions: int = 0
    resume_step: int | None = None
    closing: Closing | None = None
    closed_at: float = 0.0
    delete_files: bool = False
    place: str = ""
    inputs: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    project: str = DEFAULT_PROJECT
    revision: int = 0
    priority: int = 0
    edits: tuple[RunEdit, ...] = ()
    adopted_step: int | None = None
    damage: Mapping[str, str] = field(default_factory=dict)

    @property
    def active(self) -> bool:
        """Whether the controller has work for the run."""
        return has_work(self.state, self.closing)

    @property
    def recipe(self) -> Recipe:
        """The recipe as submitted, but for changes of a resumption. Raises UnreadableRunError."""
        try:
            return _parsed(self.stored_recipe)
        except ValidationError as error:
            fault = error.errors()[0]
            fault["input"] = _cut(fault.get("input"))
            what = explained(".".join(str(part) for part in ("recipe", *fault["loc"])), fault)[: 2 * SHOWN_CHARACTERS]
            raise UnreadableRunError(
                f"run {self.id!r} was submitted by another release, and this one cannot read it: {what}; it can "
                "only be cancelled and, once it has ended, deleted"
            ) from None

    @property
    def first_learning_rate(self) -> float:
        """learner.learning_rate before any edit: that of step records which do not state theirs."""
        edited = (edit.changes[LEARNING_RATE][0] for edit in self.edits if LEARNING_RATE in edit.changes)
        first = next(edited, None)
        return first if isinstance(first, int | float) else self.recipe.learner.learning_rate

    def edited_after(self, setting: str) -> int:
        """The committed rollout step after which a setting was edited last; 0 if it was not."""
        return max((edit.step for edit in self.edits if setting in edit.changes), default=0)

    @property
    def pinned_recipe(self) -> Recipe:
        """The recipe with the `inputs` in place of what it names on the hub. Raises UnreadableRunError."""
        return pinned(self.recipe, self.inputs)

    @property
    def problem(self) -> str:
        """Why this release cannot read the record or its recipe; "" if it can."""
        if self.damage:
            return f"run {self.id!r}: its record is damaged: {'; '.join(self.damage.values())}"
        try:
            _ = self.recipe
        except UnreadableRunError as error:
            return str(error)
        return ""

    @property
    def recipe_document(self) -> dict[str, Any] | None:
        """The recipe as it is stored, of whatever release; None if it is no JSON object."""
        try:
            document = _json(self.stored_recipe.decode())
        except (ValueError, RecursionError):
            return None
        return document if isinstance(document, dict) else None

    @property
    def reason(self) -> str:
        """Why the run is in its state."""
        return self.history[-1].reason if self.history else ""


@dataclass(frozen=True)
class RecordChange:
    """A change of a record, made in one step; `delete_keys` names other keys of the run to delete with it.

    `closings`: a run is changed only if its closing is one of these; "": it is not closed. `revision`: and only if its
    record has this revision.
    """

    state: RunState | None = None
    reason: str = ""
    fields: Mapping[str, str] | None = None
    drop: tuple[str, ...] = ()
    count: str = ""
    delete_keys: tuple[str, ...] = ()
    closings: tuple[str, ...] = ("",)
    revision: int | None = None

    def transition(self) -> str:
        """The transition to append to the run's history, as JSON; '' without a new state."""
        if self.state is None:
            return ""
        return Transition(state=self.state, at=time.time(), reason=self.reason).model_dump_json()

    def set_fields(self) -> list[str]:
        """The fields to set, as field, value, field, value, ..."""
        fields = dict(self.fields or {})
        if self.state is not None:
            fields["state"] = self.state.value
        return flat(fields)


def new_fields(
    recipe: Recipe, replicas: int, history: Sequence[Transition], files: Mapping[str, str]
) -> dict[str, str]:
    """The fields of a new record. `files`: the digests of the user's files, by name."""
    return {
        "recipe": recipe.model_dump_json(),
        "state": history[-1].state.value,
        "rollout_replicas": str(replicas),
        "history": f"[{','.join(change.model_dump_json() for change in history)}]",
        **stated(files=json.dumps(dict(files)) if files else ""),
    }


def stated(**fields: str) -> dict[str, str]:
    """Those of the fields that are not empty."""
    return {name: value for name, value in fields.items() if value}


def flat(fields: Mapping[str, str]) -> list[str]:
    """Fields as the Redis functions take them: field, value, field, value, ..."""
    return list(chain.from_iterable(fields.items()))


def pinned(recipe: Recipe, inputs: Mapping[str, str]) -> Recipe:
    """The recipe with the names of `inputs` in place of the data that it names on the hub."""
    sets = tuple(_pinned(source, inputs) for source in recipe.evaluation.sets)
    evaluation = recipe.evaluation.model_copy(update={"sets": sets})
    return recipe.model_copy(update={"data": _pinned(recipe.data, inputs), "evaluation": evaluation})


def is_record(fields: Mapping[bytes, bytes]) -> bool:
    """Whether a hash in Redis is a run's record, be it damaged."""
    return bool({b"history", b"state", b"created_at"} & fields.keys())


def read_record(run: str, fields: Mapping[bytes, bytes]) -> RunRecord:
    """What can be read of a record; see `damage`."""
    found = _Fields(fields)
    history = found.read("history", read_history)
    state = found.read("state", RunState)
    replicas = found.read("rollout_replicas", _replicas)
    created_at = found.read("created_at", _finite)
    recipe = found.read("recipe", str)
    project = found.given("project", _project, DEFAULT_PROJECT)
    return RunRecord(
        id=run,
        stored_recipe=(recipe or "").encode(),
        state=state or (history[-1].state if history else RunState.FAILED),
        rollout_replicas=replicas or 0,
        cancel_requested=found.given("cancel_requested", _flag, False),
        created_at=created_at or 0.0,
        history=history or (),
        model_path=found.given("model_path", str, None),
        export_path=found.given("export_path", str, None),
        summary=found.given("summary", _mapping, None),
        pause_requested=found.given("pause_requested", _flag, False),
        resumptions=found.given("resumptions", int, 0),
        resume_step=found.given("resume_step", int, None),
        closing=found.given("closing", Closing, None),
        closed_at=found.given("closed_at", _finite, 0.0),
        delete_files=found.given("delete_files", _flag, False),
        place=found.given("place", str, ""),
        inputs=found.given("inputs", _texts, {}),
        files=found.given("files", _texts, {}),
        project=NO_PROJECT if "project" in found.damage else project,
        revision=found.given("revision", int, 0),
        priority=found.given("priority", int, 0),
        edits=found.given("edits", _edits, ()),
        adopted_step=found.given("adopted_step", int, None),
        damage=found.damage,
    )


class _Fields:
    """The fields of a record's hash. `damage`: by field, why it cannot be read."""

    def __init__(self, fields: Mapping[bytes, bytes]) -> None:
        self._fields = fields
        self.damage: dict[str, str] = {}

    def read(self, name: str, parse: Callable[[str], T]) -> T | None:
        """A field that every record has; None if it is missing or damaged."""
        if name.encode() not in self._fields:
            self.damage[name] = f"{name}: missing: this field is required"
        return self.given(name, parse, None)

    def given(self, name: str, parse: Callable[[str], T], default: D) -> T | D:
        """A field, or the default if it is missing or damaged."""
        raw = self._fields.get(name.encode())
        if raw is None:
            return default
        try:
            return parse(raw.decode())
        except DAMAGED as error:
            shown = raw.decode(errors="replace")[:SHOWN_CHARACTERS]
            reason = str(error).splitlines()[0][:SHOWN_CHARACTERS] if str(error) else type(error).__name__
            self.damage[name] = f"{name}: {shown!r} is not valid: {reason}"
            return default


def _cut(value: Any) -> Any:
    """A value for a message: of one that is long, the start of its text."""
    text = repr(value)
    return value if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS]


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError("expected a finite number")
    return number


def _replicas(text: str) -> int:
    if not 0 <= (number := int(text)) <= MOST_RECORDED:
        raise ValueError(f"expected 0 to {MOST_RECORDED}")
    return number


def _project(text: str) -> str:
    if not PROJECT.fullmatch(text):
        raise ValueError("expected lower-case letters, digits and dashes")
    return text


def _flag(text: str) -> bool:
    return text == "1"


def _json(text: str) -> Any:
    found = json.loads(text)
    json.dumps(found, allow_nan=False)  # Python reads NaN and 1e999, which no answer of the API can hold
    return found


def _mapping(text: str) -> dict[str, Any]:
    if not isinstance(found := _json(text), dict):
        raise ValueError("expected a mapping")
    return found


def _texts(text: str) -> dict[str, str]:
    found = _mapping(text)
    if not all(isinstance(value, str) for value in found.values()):
        raise ValueError("expected texts by name")
    return found


def _edits(text: str) -> tuple[RunEdit, ...]:
    return tuple(RunEdit.model_validate(edit) for edit in _json(text))


def read_history(text: str) -> tuple[Transition, ...]:
    """The changes of a run's state, as its record has them (JSON). Raises one of DAMAGED."""
    history = tuple(Transition.model_validate(change) for change in _json(text))
    if not history:
        raise ValueError("expected at least one transition")
    return history


def _pinned(source: S, inputs: Mapping[str, str]) -> S:
    path = source.path and inputs.get(source.path, source.path)
    return source.model_copy(update={"path": path})


@lru_cache(maxsize=256)
def _parsed(recipe: bytes) -> Recipe:
    """A recipe, which nothing can change: the controller reads the same records twice a second."""
    return Recipe.model_validate_json(recipe)
