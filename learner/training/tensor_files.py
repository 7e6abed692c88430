"""Owns tensors in host memory and in safetensors files: a block to write to a file, and files to read tensors from.

Must not know what the tensors mean or where the files are. The format (huggingface.co/docs/safetensors) is written here
because the library neither hashes what it writes nor distinguishes write errors.
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
"""Bytes that are hashed and written at a time. Other threads run in between."""
DTYPES = {"F32": torch.float32, "F64": torch.float64, "I64": torch.int64}
"""The supported dtypes, by their names in the format."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class TensorLayout(NamedTuple):
    """Dtype and shape of a tensor, known before it is read."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """The size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class HostBlock:
    """Named tensors in one block of host memory, in the layout of a safetensors file."""

    def __init__(self, layouts: Mapping[str, TensorLayout]) -> None:
        """Allocate the block, uninitialised. Raises KeyError for a dtype that is not supported."""
        self._places: dict[str, tuple[int, TensorLayout]] = {}
        header, offset = {}, 0
        # Wide dtypes first, so that every tensor is aligned.
        for name, layout in sorted(layouts.items(), key=lambda item: -item[1].dtype.itemsize):
            ends = offset + layout.size
            self._places[name] = (offset, layout)
            place = {"data_offsets": [offset, ends]}
            header[name] = {"dtype": NAMES[layout.dtype], "shape": list(layout.shape), **place}
            offset = ends
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._head = len(text).to_bytes(8, "little") + text
        # One allocation, so that its memory returns to the operating system when the block is freed.
        self._data = torch.empty(offset, dtype=torch.uint8)

    def __getitem__(self, name: str) -> Tensor:
        """A view of the tensor. Writing to it fills the block."""
        offset, layout = self._places[name]
        return self._data[offset : offset + layout.size].view(layout.dtype).view(layout.shape)

    @property
    def size(self) -> int:
        """The size of the file in bytes."""
        return len(self._head) + len(self._data)

    def chunks(self) -> Iterator[memoryview]:
        """The contents of the file, from start to end."""
        yield memoryview(self._head)
        data = self._data.numpy().data
        for start in range(0, len(data), CHUNK_BYTES):
            yield data[start : start + CHUNK_BYTES]


class TensorFiles:
    """The tensors of several safetensors files by name. The files are mapped: unused tensors are not read."""

    def __init__(self, files: Sequence[Any]) -> None:
        self._homes = {name: file for file in files for name in file.keys()}  # noqa: SIM118 - not a mapping

    def layouts(self) -> dict[str, TensorLayout]:
        """The layouts of all tensors. Raises KeyError for a dtype that is not supported."""
        slices = {name: file.get_slice(name) for name, file in self._homes.items()}
        return {
            name: TensorLayout(DTYPES[tensor.get_dtype()], tuple(tensor.get_shape())) for name, tensor in slices.items()
        }

    def __getitem__(self, name: str) -> Tensor:
        """The tensor, on the CPU. Copy it before the files are closed."""
        found: Tensor = self._homes[name].get_tensor(name)
        return found


@contextmanager
def tensor_files(paths: Sequence[Path]) -> Iterator[TensorFiles]:
    """Open `paths` for the body. Raises ArchiveError, which names the file."""
    with ExitStack() as stack:
        files = []
        for path in paths:
            try:
                files.append(stack.enter_context(safe_open(path, framework="pt")))
            except (OSError, SafetensorError) as error:
                raise ArchiveError(f"{path}: cannot be read ({' '.join(str(error).split())})") from None
        yield TensorFiles(files)
