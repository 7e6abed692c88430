"""Owns a model's safetensors shards: whether their tensors are exactly a network's, and reading a part of a tensor.

Must not know devices, ranks or DeepSpeed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
BLOCK_ELEMENTS = 1 << 24
"""Elements that are read at a time, or one row if it is longer."""


class Shards:
    """The tensors of a folder by name. The files are mapped, so that only what is read takes memory."""

    def __init__(self, slices: Mapping[str, Any]) -> None:
        self._slices = slices

    def mismatch(self, network: Any) -> str | None:
        """Why these are not exactly the tensors of a transformers `network`, or None.

        A tied parameter must be there under exactly one of its names.
        """
        if renamed := _renamed(network, self._slices):
            return f"transformers converts {renamed!r} when it loads this architecture"
        held = set(self._slices)
        for names, parameter in parameters_with_names(network).values():
            found = held.intersection(names)
            if len(found) != 1:
                return f"parameter {names[0]!r} is in the files {len(found)} times, not once"
            shape = tuple(self._slices[found.pop()].get_shape())
            if shape != tuple(parameter.shape):
                return f"parameter {names[0]!r} has the shape {list(shape)} in the files, not {list(parameter.shape)}"
            held.difference_update(names)
        if held:
            return f"{min(held)!r} is in the files, but is no parameter of {type(network).__name__}"
        return None

    def read(self, names: Iterable[str], start: int, into: Tensor) -> None:
        """Copy the elements from `start` on of the flattened tensor to `into`, which is flat, and zeros past its end.

        `names`: all names of the tensor; the files have one of them. Only the rows that hold these elements are read,
        a block at a time.
        """
        slices = next(self._slices[name] for name in names if name in self._slices)
        shape = tuple(slices.get_shape()) or (1,)
        row, stop = prod(shape[1:]), min(start + into.numel(), prod(shape))
        at = start
        while at < stop:
            first = at // row
            last = min(-(-stop // row), first + max(1, BLOCK_ELEMENTS // row))
            until = min(stop, last * row)
            rows = slices[first:last] if slices.get_shape() else slices[...]
            into[at - start : until - start].copy_(rows.reshape(-1)[at - first * row : until - first * row])
            at = until
        into[max(stop - start, 0) :].zero_()


@contextmanager
def open_shards(folder: Path) -> Iterator[Shards | None]:
    """Open the shards of a Hugging Face folder for the body; None if it has no safetensors files.

    Raises ValueError for a file that is missing or damaged.
    """
    files = _files(folder)
    with ExitStack() as stack:
        slices: dict[str, Any] = {}
        for path in files:
            try:
                opened = stack.enter_context(safe_open(path, framework="pt"))
            except (OSError, SafetensorError) as error:
                reason = " ".join(str(error).split())
                raise ValueError(f"model: {str(path)!r} is not valid: expected a safetensors file; {reason}") from None
            slices |= {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - not a mapping
        yield Shards(slices) if files else None


def _files(folder: Path) -> list[Path]:
    # transformers prefers the single file too.
    if (folder / ONE_FILE).is_file():
        return [folder / ONE_FILE]
    index = folder / INDEX
    if not index.is_file():
        return []
    return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]


def parameters_with_names(network: nn.Module) -> dict[int, tuple[list[str], nn.Parameter]]:
    """Every parameter by its id, with all of its names: a tied one has several."""
    found: dict[int, tuple[list[str], nn.Parameter]] = {}
    for name, parameter in network.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), ([], parameter))[0].append(name)
    return found


def _renamed(network: Any, names: Iterable[str]) -> str | None:
    """The first of `names` that transformers would rename or convert for this network, or None."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    mapping = get_model_conversion_mapping(network)
    for name in sorted(names):
        for transform in mapping:
            found, pattern = transform.rename_source_key(name)
            if found != name or pattern is not None:
                return name
    return None
