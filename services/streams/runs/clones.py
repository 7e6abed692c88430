"""Owns what a copy of a run starts from: the run's recipe with other values, and its files.

Must not add a run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from services.settings import RecipeError
from services.settings.faults import invalid
from services.storage.errors import StoreError
from services.storage.kept_files import read_kept_files
from services.storage.mirror import run_mirror
from services.storage.places import runs_folder
from services.streams.connection.client import Redis
from services.streams.state.rewards.reward_files import RewardFileError, read_reward_files
from services.streams.state.run_record import RunRecord
from services.streams.state.runs import RunStateError

MOST_DEPTH = 8
"""Of a setting's dotted name."""


def overridden(record: RunRecord, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The document of the run's recipe, as edited last, with these values by dotted name in place of its own.

    Raises RecipeError for a name that leads through a value which has no settings; UnreadableRunError.
    """
    document: dict[str, Any] = record.recipe.model_dump(mode="json")
    document["rollout"]["replicas"] = record.rollout_replicas
    for name, value in overrides.items():
        *sections, setting = name.split(".")
        place: Any = document
        for section in sections:
            place = place.get(section) if isinstance(place, dict) else None
        if not isinstance(place, dict) or not setting or len(sections) > MOST_DEPTH:
            raise RecipeError(invalid(f"overrides.{name[:200]}", value, "the dotted name of a setting of the recipe"))
        place[setting] = value
    return document


async def files_of(redis: Redis, record: RunRecord) -> dict[str, str]:
    """The texts of a run's files, by name: of Redis, or of the run's folder once Redis has them no more.

    Raises RunStateError if they are nowhere.
    """
    try:
        return await read_reward_files(redis, record)
    except RewardFileError as error:
        folder, mirror = runs_folder() / record.id, run_mirror(record.id)
        try:
            texts = await asyncio.to_thread(read_kept_files, folder, mirror)
        except (StoreError, OSError) as missing:
            raise RunStateError(f"{error}; {missing}") from None
        if texts.keys() < record.files.keys():
            raise RunStateError(str(error)) from None
        return texts
