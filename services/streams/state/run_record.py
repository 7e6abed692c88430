"""Owns what a run's record holds, and how it is read from Redis.

Must not read or change a record.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar

from pydantic import ValidationError

from services.contracts import Closing, RunState, Transition
from services.settings import Recipe, SourceSettings
from services.settings.faults import explained

S = TypeVar("S", bound=SourceSettings)


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
            what = explained(".".join(str(part) for part in ("recipe", *fault["loc"])), fault)
            raise UnreadableRunError(
                f"run {self.id!r} was submitted by another release, and this one cannot read it: {what}; it can "
                "only be cancelled and, once it has ended, deleted"
            ) from None

    @property
    def pinned_recipe(self) -> Recipe:
        """The recipe with the `inputs` in place of what it names on the hub. Raises UnreadableRunError."""
        return pinned(self.recipe, self.inputs)

    @property
    def problem(self) -> str:
        """Why this release cannot read the recipe; "" if it can."""
        try:
            _ = self.recipe
        except UnreadableRunError as error:
            return str(error)
        return ""

    @property
    def reason(self) -> str:
        """Why the run is in its state."""
        return self.history[-1].reason if self.history else ""


def pinned(recipe: Recipe, inputs: Mapping[str, str]) -> Recipe:
    """The recipe with the names of `inputs` in place of the data that it names on the hub."""
    sets = tuple(_pinned(source, inputs) for source in recipe.evaluation.sets)
    evaluation = recipe.evaluation.model_copy(update={"sets": sets})
    return recipe.model_copy(update={"data": _pinned(recipe.data, inputs), "evaluation": evaluation})


def decode_record(run: str, fields: dict[bytes, bytes]) -> RunRecord:
    """A record from its hash in Redis; its recipe is read when it is needed. Raises UnreadableRunError."""
    try:
        return _decoded(run, fields)
    except (ValueError, KeyError) as error:
        raise UnreadableRunError(f"run {run!r}: its record is damaged: {error}") from None


def _decoded(run: str, fields: dict[bytes, bytes]) -> RunRecord:
    text = {name.decode(): value.decode() for name, value in fields.items()}
    history = tuple(Transition.model_validate(change) for change in json.loads(text["history"]))
    return RunRecord(
        id=run,
        stored_recipe=fields[b"recipe"],
        state=RunState(text["state"]),
        rollout_replicas=int(text["rollout_replicas"]),
        cancel_requested=text.get("cancel_requested") == "1",
        created_at=float(text["created_at"]),
        history=history,
        model_path=text.get("model_path"),
        export_path=text.get("export_path"),
        summary=json.loads(text["summary"]) if "summary" in text else None,
        pause_requested=text.get("pause_requested") == "1",
        resumptions=int(text.get("resumptions", 0)),
        resume_step=int(text["resume_step"]) if "resume_step" in text else None,
        closing=Closing(text["closing"]) if "closing" in text else None,
        closed_at=float(text.get("closed_at", 0)),
        delete_files=text.get("delete_files") == "1",
        place=text.get("place", ""),
        inputs=json.loads(text.get("inputs", "{}")),
        files=json.loads(text.get("files", "{}")),
    )


def _pinned(source: S, inputs: Mapping[str, str]) -> S:
    path = source.path and inputs.get(source.path, source.path)
    return source.model_copy(update={"path": path})


@lru_cache(maxsize=256)
def _parsed(recipe: bytes) -> Recipe:
    """A recipe, which nothing can change: the controller reads the same records twice a second."""
    return Recipe.model_validate_json(recipe)
