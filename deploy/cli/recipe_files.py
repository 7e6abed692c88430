"""Owns the reading of a recipe with the files beside it, which its rewards name and which travel with its run.

Must not decide what a file may hold; services.settings does.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from services.settings import Recipe


def load_with_files(path: Path) -> tuple[Recipe, dict[str, str]]:
    """A valid recipe, and the texts of the files beside it that it names. Raises RecipeError."""
    from services.settings import load_recipe

    recipe = load_recipe(path)
    return recipe, read_files(recipe, path.parent)


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
