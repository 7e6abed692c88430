"""Owns what a submission may meet of other runs: their exports, which its recipe names, and files left under its id.

Must not show what belongs to a project that is not visible to who submits.
"""

from __future__ import annotations

import asyncio

from services.api.access.roles import Principal
from services.api.access.settings import EVERY_PROJECT
from services.api.addresses import named_files
from services.settings import Recipe, RecipeError
from services.storage import objects
from services.storage.places import configured_store, runs_folder
from services.storage.roots.allowed import FACTS, GROUPS, PathFaultError, fault_text, load_roots
from services.streams.state.runs import RunRecords, RunStateError, UnknownRunError

VISIBLE = "the export of a run that is visible to you"


class UsedFolderError(RunStateError):
    """Files of an earlier run are where those of a new one would be."""

    def __init__(self, run: str) -> None:
        super().__init__(
            f"id: {run!r} is not valid: expected an id under which no files of an earlier run are left; adopt it "
            "(POST /v1/runs/adopt), delete or move them, or choose another id"
        )


async def check_exports(records: RunRecords, principal: Principal, recipe: Recipe) -> None:
    """Check the exports that a recipe names. `recipe`: its addresses were checked. Raises RecipeError.

    One of a run without a record may be of any project, so that it needs a role in all.
    """
    roots, faults = load_roots(), []
    for named in named_files(recipe):
        try:
            run = roots.exporter(named.text)
        except PathFaultError as error:  # a link was exchanged meanwhile
            faults.append(fault_text(named.field, named.text, error))
            continue
        if run is not None and principal.role_in(await _project_of(records, run)) is None:
            faults.append(fault_text(named.field, named.text, VISIBLE))
    if faults:
        raise RecipeError("\n".join(faults))


async def _project_of(records: RunRecords, run: str) -> str:
    try:
        return (await records.shown(run)).project
    except UnknownRunError:
        return EVERY_PROJECT


async def check_unused(run: str) -> None:
    """Raises UsedFolderError if an earlier run left samples, checkpoints or an export under the id; StoreError."""
    if await asyncio.to_thread(_is_used, run):
        raise UsedFolderError(run)


def _is_used(run: str) -> bool:
    folder, store = runs_folder() / run, configured_store()
    if any((folder / name).exists() for name in (FACTS, GROUPS)):
        return True
    return store is not None and bool(objects.head(store / run / FACTS) or objects.listed(store / run / GROUPS))
