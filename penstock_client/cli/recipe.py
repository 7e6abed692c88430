"""Owns the reading of a recipe for its submission, with the files beside it that its rewards name.

Must not know a setting beyond these files: the API checks the rest, and refuses a file too few or too many.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock_client.errors import ApiError

FUNCTION = re.compile(r"(?:python:)?(\./[^:\s]+):[^:\s]+")
"""A function in a file beside the recipe, in its short or long form."""
FILE_FIELDS = ("rubric", "chat_template")
MOST_BYTES = 256 * 1024
DEEPEST = 64


class RecipeFileError(ApiError):
    """A recipe, or a file that it names, cannot be read or is not valid; one line per fault. Nothing was sent."""


@dataclass(frozen=True)
class ReadRecipe:
    """A recipe as a document, and the texts of the files that travel with it, by the names that it gives them."""

    document: dict[str, Any]
    files: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The recipe's name, from which the id of a run is derived."""
        return str(self.document.get("name", ""))


RecipeReader = Callable[[Path, str], ReadRecipe]
"""Reads a recipe for the API at an address. Raises RecipeFileError."""


def read_recipe(path: Path, _api: str) -> ReadRecipe:
    """The recipe in a YAML or JSON file, unchecked, and the texts of the files beside it. Raises RecipeFileError."""
    import yaml

    try:
        document = yaml.safe_load(path.read_bytes())
    except OSError as error:
        raise RecipeFileError(f"{path}: cannot be read ({error.strerror})") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise RecipeFileError(f"{path}: not valid YAML ({error})".replace("\n", " ")) from None
    if not isinstance(document, dict):
        raise RecipeFileError(f"{path}: not valid: expected a mapping, as docs/recipes.md describes it")
    names = sorted(set(_named(document, 0)))
    return ReadRecipe(document, {name: _text(name, path.parent.resolve()) for name in names})


def _named(value: Any, depth: int) -> Iterator[str]:
    """The files that rewards name: functions (`./FILE.py:NAME`), rubrics, a chat template, and `verifier.files`."""
    if depth > DEEPEST:
        raise RecipeFileError(f"the recipe is not valid: expected at most {DEEPEST} levels")
    if isinstance(value, str) and (found := FUNCTION.fullmatch(value)):
        yield found[1]
    elif isinstance(value, list):
        for entry in value:
            yield from _named(entry, depth + 1)
    elif isinstance(value, dict):
        for key, entry in value.items():
            if key in FILE_FIELDS and isinstance(entry, str) and entry.startswith("./"):
                yield entry
            elif key == "verifier" and isinstance(entry, dict) and isinstance(entry.get("files"), list):
                yield from (name for name in entry["files"] if isinstance(name, str))
            yield from _named(entry, depth + 1)


def _text(name: str, folder: Path) -> str:
    path = (folder / name).resolve()
    try:
        # Before the path is used: a link may name anything on this machine, which would be sent to the API.
        if not path.is_relative_to(folder) or not path.is_file():
            raise RecipeFileError(f"recipe: {name!r} is not valid: expected a file in {folder}, and no link out of it")
        if path.stat().st_size > MOST_BYTES:
            raise RecipeFileError(f"recipe: {name!r} is not valid: expected at most {MOST_BYTES} bytes")
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise RecipeFileError(f"recipe: {name!r} is not valid: expected UTF-8 (byte {error.start + 1})") from None
    except OSError as error:
        raise RecipeFileError(f"recipe: {name!r} in {folder} cannot be read ({error.strerror})") from None
