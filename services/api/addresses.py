"""Owns the check of the files and addresses that a recipe names, before a run is accepted.

Must not connect to the hub or a store, nor open a file: whether a repository or an object exists is known when the run
is placed, and so is a file that this machine does not see.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NamedTuple

from services.settings import NO_TEMPLATE, ClusterLimitsError, Recipe, RecipeError
from services.settings.faults import invalid
from services.settings.rewards.kinds import checked_file
from services.storage.errors import StoreError
from services.storage.hub.address import SCHEME, Kind, is_hub, parse_hub
from services.storage.places import is_remote
from services.storage.roots.allowed import (
    ABSOLUTE,
    BESIDE,
    SHOWN_CHARACTERS,
    VARIABLE,
    AllowedRoots,
    PathFaultError,
    RootsError,
    check_form,
    fault_text,
    load_roots,
)
from services.storage.roots.opening import existence_fault

OF_ONE_FILE = ("jsonl", "csv")
"""Sources that read one file; the others also take all Parquet or Arrow files of a repository."""
TEMPLATE = "model.chat_template"
KINDS: dict[str, bool | None] = {"jsonl": False, "csv": False, "parquet": None, "hf": True}
"""Whether a source reads a folder; None: either."""


class NamedFile(NamedTuple):
    """A path of a recipe: the setting that names it, and whether it is a folder; None: either."""

    field: str
    text: str
    folder: bool | None


def checked_addresses(recipe: Recipe) -> Recipe:
    """The same recipe. Raises RecipeError, one line per address or path that it may not name, or that names nothing.

    Looks at the file system, which may block. Raises ClusterLimitsError if PENSTOCK_ROOTS cannot be used.
    """
    return _checked(recipe, all_places=True)


def checked_here(recipe: Recipe) -> Recipe:
    """The same recipe, checked by a command that does not know which API it is for. Raises as checked_addresses.

    Without PENSTOCK_ROOTS the roots hold only for a path that this machine has; another may be that of a cluster.
    """
    return _checked(recipe, all_places=VARIABLE in os.environ)


def named_files(recipe: Recipe) -> Iterator[NamedFile]:
    """The paths and store addresses of a recipe, without those of the hub and files that travel with the run."""
    template = recipe.model.chat_template
    if template not in (None, NO_TEMPLATE) and not str(template).startswith((SCHEME, BESIDE)):
        yield NamedFile(TEMPLATE, str(template), folder=False)
    if recipe.model.path is not None and not is_hub(recipe.model.path):
        yield NamedFile("model.path", recipe.model.path, folder=True)
    for section, source in recipe.data_sources.items():
        if source.path is not None and not is_hub(source.path):
            yield NamedFile(f"{section}.path", source.path, KINDS[source.source])


def _checked(recipe: Recipe, *, all_places: bool) -> Recipe:
    try:
        roots = load_roots()
    except (RootsError, StoreError) as error:
        raise ClusterLimitsError(str(error)) from None
    faults = [*_hub_faults(recipe), *_template_faults(recipe)]
    for named in named_files(recipe):
        try:
            expected = _expected(named, roots, all_places=all_places)
        except PathFaultError as error:
            expected = str(error)
        if expected:
            faults.append(fault_text(named.field, named.text, expected))
    if faults:
        raise RecipeError("\n".join(faults))
    return recipe


def _expected(named: NamedFile, roots: AllowedRoots, *, all_places: bool) -> str:
    """What is expected in place of a path; "" if nothing is wrong with it. Raises PathFaultError."""
    check_form(named.text)
    remote = is_remote(named.text)
    if not remote and not os.path.isabs(named.text):
        return ABSOLUTE
    if not all_places and (remote or not os.path.exists(named.text)):
        return ""
    if remote:
        roots.address(named.text)
        return ""
    return existence_fault(roots.resolved(named.text), roots, folder=named.folder)


def _template_faults(recipe: Recipe) -> Iterator[str]:
    """Of a template beside the recipe, whose name becomes that of a file below the run's folder."""
    template = recipe.model.chat_template or ""
    if template.startswith(SCHEME):
        yield fault_text(TEMPLATE, template, "a local path or s3://...; the hub serves models and data only")
    if template.startswith(BESIDE):
        try:
            checked_file(TEMPLATE, template[: SHOWN_CHARACTERS + 1])
        except ValueError as error:
            yield str(error)


def _hub_faults(recipe: Recipe) -> Iterator[str]:
    yield from _address_faults("model.path", recipe.model.path, "model")
    for section, source in recipe.data_sources.items():
        one_file = source.source if source.source in OF_ONE_FILE else None
        yield from _address_faults(f"{section}.path", source.path, "dataset", one_file=one_file)


def _address_faults(field: str, text: str | None, kind: Kind, *, one_file: str | None = None) -> Iterator[str]:
    """`one_file`: the source that reads a single file, None for others."""
    if text is None or not is_hub(text):
        return
    try:
        address = parse_hub(text, field, kind)
    except StoreError as error:
        yield str(error)
        return
    if one_file and not address.path:
        yield invalid(field, text, f"ORG/NAME@REVISION/PATH of one file with source = {one_file!r}")
