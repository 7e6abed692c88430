"""Owns the reading of a recipe with the files beside it: those that travel with its run, and where its paths begin.

Must not decide what a file may hold; services.settings does.
"""

from __future__ import annotations

import os
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from services.settings import Recipe, SourceSettings

S = TypeVar("S", bound="SourceSettings")

SHOWN = 200
"""Characters of a path that an error shows."""


def load_with_files(path: Path, api: str | None = None) -> tuple[Recipe, dict[str, str]]:
    """A valid recipe, its paths as `load_own` resolves them, and the texts of the files beside it that it names.

    Raises RecipeError.
    """
    recipe = load_own(path, api)
    return recipe, read_files(recipe, path.parent)


def load_own(path: Path, api: str | None = None) -> Recipe:
    """A valid recipe whose relative paths begin at its folder: of model and data made absolute, of a template `./NAME`.

    `api`: the address of the API that it is for; None: one on this machine. Raises RecipeError, for a relative path of
    model or data also if the API is on another machine.
    """
    from services.settings import load_recipe

    recipe, folder = load_recipe(path), path.parent
    model = {
        "path": _absolute("model.path", recipe.model.path, folder, api),
        "chat_template": _template(recipe.model.chat_template),
    }
    sets = tuple(_own_source(f"evaluation.sets {each.name!r}", each, folder, api) for each in recipe.evaluation.sets)
    changes = {
        "model": recipe.model.model_copy(update=model),
        "data": _own_source("data", recipe.data, folder, api),
        "evaluation": recipe.evaluation.model_copy(update={"sets": sets}),
    }
    return recipe.model_copy(update=changes)


def _own_source(section: str, source: S, folder: Path, api: str | None) -> S:
    return source.model_copy(update={"path": _absolute(f"{section}.path", source.path, folder, api)})


def _absolute(field: str, text: str | None, folder: Path, api: str | None) -> str | None:
    from services.settings import RecipeError
    from services.settings.faults import invalid
    from services.storage.hub.address import is_hub
    from services.storage.places import is_remote

    if text is None or is_hub(text) or is_remote(text) or os.path.isabs(text):
        return text
    if api is not None and not _is_here(api):
        expected = f"an absolute path that the machines of {api} have, s3://... or ORG/NAME@REVISION"
        raise RecipeError(invalid(field, text[:SHOWN], f"{expected}; what is on this machine is not sent there"))
    if "\0" in text:
        raise RecipeError(invalid(field, text[:SHOWN], "a path without NUL"))
    # What precedes a `..` may be a link, which only the system can resolve.
    return os.path.realpath(folder / text) if ".." in Path(text).parts else str(folder.absolute() / text)


def _template(text: str | None) -> str | None:
    """The template of a recipe; a relative path as the name of a file that travels with the run. Raises RecipeError."""
    from services.settings import NO_TEMPLATE, RecipeError
    from services.settings.rewards.kinds import checked_file

    if text is None or text == NO_TEMPLATE or "://" in text or os.path.isabs(text):
        return text
    try:
        return checked_file("model.chat_template", f"./{os.path.normpath(text)[:SHOWN]}")
    except ValueError as error:
        raise RecipeError(str(error)) from None


def _is_here(api: str) -> bool:
    """Whether an API listens on this machine only, so that it has the files of this machine."""
    host = urlsplit(api).hostname or ""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def read_files(recipe: Recipe, folder: Path) -> dict[str, str]:
    """The texts of the files in `folder` that a recipe names, checked. Raises RecipeError, one line per fault."""
    from services.settings import RecipeError, check_files
    from services.settings.rewards.files import settings_by_file

    texts, faults = dict[str, str](), list[str]()
    for name, setting in settings_by_file(recipe.file_uses).items():
        try:
            texts[name] = _text(name, setting, folder.resolve())
        except RecipeError as error:
            faults.append(str(error))
    if faults:
        raise RecipeError("\n".join(sorted(faults)))
    check_files(recipe, texts)
    return texts


def _text(name: str, setting: str, folder: Path) -> str:
    from services.settings import RecipeError
    from services.settings.faults import invalid
    from services.settings.rewards.files import size_fault

    path = (folder / name).resolve()
    try:
        # Before the path is used: a link may name anything on this machine, which would be sent to the API.
        if not path.is_relative_to(folder):
            raise RecipeError(invalid(setting, name, f"a file in {folder}, and not a link to {path}"))
        if not path.is_file():
            raise RecipeError(invalid(setting, name, f"a file in {folder}, which has none of that name"))
        if fault := size_fault(name, path.stat().st_size):
            raise RecipeError(fault)
        # As it is: no line end is changed, so that the digest is that of the file.
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        found = error.object[error.start : error.end]
        raise RecipeError(invalid(f"files {name!r}", found, f"UTF-8 (it is byte {error.start + 1})")) from None
    except OSError as error:
        raise RecipeError(f"{setting}: {name!r} in {folder} cannot be read ({error.strerror})") from None
