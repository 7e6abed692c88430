"""Owns tensors between host memory and safetensors files: a block to write a file from, files to read tensors from.

Must not know what the tensors mean, nor where files lie. Format: huggingface.co/docs/safetensors; written here because
the library neither hashes what it writes nor tells one failed write from another.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from learner.archive import ArchiveError

CHUNK_BYTES = 8 << 20
"""Bytes that are hashed and written at a time; other threads run meanwhile."""
DTYPES = {"F32": torch.float32, "F64": torch.float64, "I64": torch.int64}
"""The dtypes that are kept, by their names in the format."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class TensorLayout(NamedTuple):
    """What stands for a tensor before it is read."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """In bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class HostBlock:
    """Named tensors in one block of host memory, which has the layout of a safetensors file."""

    def __init__(self, layouts: Mapping[str, TensorLayout]) -> None:
        """Make room; the contents are whatever was there before. Raises KeyError for a dtype that is not kept."""
        self._places: dict[str, tuple[int, TensorLayout]] = {}
        header, offset = {}, 0
        # Wide ones first, so that every tensor is aligned.
        for name, layout in sorted(layouts.items(), key=lambda item: -item[1].dtype.itemsize):
            ends = offset + layout.size
            self._places[name] = (offset, layout)
            header[name] = {
                "dtype": NAMES[layout.dtype], "shape": list(layout.shape), "data_offsets": [offset, ends],
            }  # fmt: skip
            offset = ends
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._head = len(text).to_bytes(8, "little") + text
        # One allocation, so that it goes back to the system when it is let go of.
        self._data = torch.empty(offset, dtype=torch.uint8)

    def __getitem__(self, name: str) -> Tensor:
        """A view; writing to it fills the block."""
        offset, layout = self._places[name]
        return self._data[offset : offset + layout.size].view(layout.dtype).view(layout.shape)

    @property
    def size(self) -> int:
        """Of the file, in bytes."""
        return len(self._head) + len(self._data)

    def chunks(self) -> Iterator[memoryview]:
        """The file, front to back."""
        yield memoryview(self._head)
        data = self._data.numpy().data
        for start in range(0, len(data), CHUNK_BYTES):
            yield data[start : start + CHUNK_BYTES]


class TensorFiles:
    """The tensors of several safetensors files by name. They are mapped: what is not used is not read."""

    def __init__(self, files: Sequence[Any]) -> None:
        self._homes = {name: file for file in files for name in file.keys()}  # noqa: SIM118 - it is no mapping

    def layouts(self) -> dict[str, TensorLayout]:
        """Of all tensors. Raises KeyError for a dtype that is not kept."""
        slices = {name: file.get_slice(name) for name, file in self._homes.items()}
        return {name: TensorLayout(DTYPES[one.get_dtype()], tuple(one.get_shape())) for name, one in slices.items()}

    def __getitem__(self, name: str) -> Tensor:
        """On the CPU; to be copied from while the files are open."""
        found: Tensor = self._homes[name].get_tensor(name)
        return found


@contextmanager
def tensor_files(paths: Sequence[Path]) -> Iterator[TensorFiles]:
    """Open `paths` while the body reads. Raises ArchiveError, naming the file."""
    with ExitStack() as stack:
        files = []
        for path in paths:
            try:
                files.append(stack.enter_context(safe_open(path, framework="pt")))
            except (OSError, SafetensorError) as error:
                raise ArchiveError(f"{path}: cannot be read ({' '.join(str(error).split())})") from None
        yield TensorFiles(files)
