"""Owns the check of a recipe's addresses on the hub, before a run is accepted.

Must not connect to the hub, nor look at a file: whether the repository exists is known when the run is placed.
"""

from __future__ import annotations

from collections.abc import Iterator

from services.settings import Recipe, RecipeError
from services.settings.faults import invalid
from services.storage.errors import StoreError
from services.storage.hub.address import SCHEME, Kind, is_hub, parse_hub

OF_ONE_FILE = ("jsonl", "csv")
"""Sources that read one file; the others also take all Parquet or Arrow files of a repository."""


def checked_addresses(recipe: Recipe) -> Recipe:
    """The same recipe. Raises RecipeError, one line per address that no repository, or none of its kind, can have."""
    if faults := list(_faults(recipe)):
        raise RecipeError("\n".join(faults))
    return recipe


def _faults(recipe: Recipe) -> Iterator[str]:
    template = recipe.model.chat_template
    if template is not None and template.startswith(SCHEME):
        yield invalid("model.chat_template", template, "a local path or s3://...; the hub serves models and data only")
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
