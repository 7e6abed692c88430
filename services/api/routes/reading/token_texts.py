"""Owns the texts of tokens: a run's tokenizer, where its model is on this node.

Must not download a model, nor fail where there is none: the texts are then unknown.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from services.storage.hub.address import is_pinned
from services.storage.models import PACKAGE, models_folder, packaged_folder
from services.storage.places import is_remote

log = logging.getLogger(__name__)


def token_texts(model_path: str | None, ids: Sequence[int]) -> list[str] | None:
    """The text that each token adds to the response; None without a tokenizer on this node. Blocks."""
    tokenizer = _tokenizer(model_path) if model_path else None
    if tokenizer is None:
        return None
    stream = DecodeStream(skip_special_tokens=False)
    return [stream.step(tokenizer, token) or "" for token in ids]


@lru_cache(maxsize=8)
def _tokenizer(model_path: str) -> Tokenizer | None:
    if is_remote(model_path) or is_pinned(model_path):
        return None
    package = model_path.removeprefix(PACKAGE)
    folder = Path(model_path) if package == model_path else packaged_folder(package, models_folder())
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001 - the library raises no narrower class
        log.warning("the tokenizer of %s cannot be read: %s", folder.name, type(error).__name__)
        return None
