"""Owns which files of a repository on the hub are needed. Their names are input that a stranger controls.

Must not read or fetch one. Code and pickled weights are never among them, so that nothing in a repository is executed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

from services.storage.errors import StoreError
from services.storage.hub.address import HubAddress

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
SHARD = re.compile(r"model-\d+-of-\d+\.safetensors", re.ASCII)
SETTINGS = re.compile(
    r"config\.json|generation_config\.json|tokenizer_config\.json|special_tokens_map\.json|added_tokens\.json"
    r"|tokenizer\.(json|model)|vocab\.(json|txt)|merges\.txt|chat_template\.(jinja|json)"
    r"|additional_chat_templates/[\w-]+\.jinja",
    re.ASCII,
)
DATA = re.compile(r".*\.(parquet|arrow)|(.*/)?(dataset_dict|dataset_info|state)\.json")
"""The files of a folder with data; another file is fetched only where its own path is given."""
UNSAFE = re.compile(r"[\x00-\x1f\x7f\\]")
LONGEST_PART = 200
NAMED = 5
"""How many of a repository's files an error names."""


def needed_files(at: HubAddress, names: Iterable[str]) -> list[str]:
    """The files to fetch, of all in the repository, in order. Raises StoreError, which says what is missing."""
    known = sorted(names)
    if at.kind == "model" and not at.path:
        return _model_files(known)
    found = [at.path] if at.path in known else [name for name in known if _below(at.path, name)]
    if not found:
        what = f"no file or folder with data {at.path!r}" if at.path else "no Parquet or Arrow file"
        raise StoreError(f"it has {what}; {_listed(known)}")
    for name in found:
        if not _safe(name):
            raise StoreError(f"it has a file with the name {name[:LONGEST_PART]!r}, which is refused")
    return found


def check_index(folder: Path, files: Iterable[str]) -> None:
    """Check that the index of the weights, if there is one, names only `files`. Raises StoreError, OSError."""
    if not (folder / INDEX).is_file():
        return
    try:
        named = {str(name) for name in json.loads((folder / INDEX).read_bytes())["weight_map"].values()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise StoreError(f"its {INDEX} is not an index of weights") from None
    if strange := sorted(named - set(files)):
        raise StoreError(f"its {INDEX} names weights that it has not: {_listed(strange)}")


def _model_files(known: list[str]) -> list[str]:
    shards = [name for name in known if SHARD.fullmatch(name)]
    weights = [WEIGHTS] if WEIGHTS in known else [INDEX, *shards] if INDEX in known and shards else []
    has = {
        CONFIG: CONFIG in known,
        f"weights as safetensors ({WEIGHTS}, or {INDEX} and its parts; pickled weights are refused)": bool(weights),
        f"tokenizer ({' or '.join(TOKENIZER_FILES)})": any(name in known for name in TOKENIZER_FILES),
    }
    if missing := [what for what, there in has.items() if not there]:
        raise StoreError(f"it has no {', no '.join(missing)}; {_listed(known)}")
    return [name for name in known if SETTINGS.fullmatch(name)] + weights


def _below(path: str, name: str) -> bool:
    return name.startswith(f"{path}/" if path else "") and DATA.fullmatch(name) is not None


def _safe(name: str) -> bool:
    """Whether a file may be written by this name below a folder; hidden names are ours and the library's."""
    parts = name.split("/")
    return not UNSAFE.search(name) and all(
        part and not part.startswith(".") and len(part.encode()) <= LONGEST_PART for part in parts
    )


def _listed(names: list[str]) -> str:
    shown = ", ".join(repr(name[:LONGEST_PART]) for name in names[:NAMED])
    return f"{len(names)} files: {shown}{', ...' if len(names) > NAMED else ''}" if names else "it is empty"
