"""Owns what both ends of a broadcast compute of a bucket: its tensors' places in the flat buffer, and its checksum.

Must not import torch; sizes come from the manifest only.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from services.contracts import TensorEntry

ALIGNMENT = 16
"""Bytes. Each tensor starts at a multiple of it, so that every view of a checked buffer is aligned."""

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}


@dataclass(frozen=True)
class BucketLayout:
    """`size` bytes in total (a multiple of 16); tensor i starts at byte `offsets[i]`; padding is zero."""

    size: int
    offsets: tuple[int, ...]


def tensor_bytes(entry: TensorEntry) -> int:
    """Bytes of the tensor itself, without padding. Raises ValueError for an unknown dtype."""
    if entry.dtype not in DTYPE_BYTES:
        raise ValueError(f"{entry.name}.dtype: {entry.dtype!r} is not valid: expected one of {sorted(DTYPE_BYTES)}")
    return prod(entry.shape) * DTYPE_BYTES[entry.dtype]


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def bucket_layout(bucket: tuple[TensorEntry, ...]) -> BucketLayout:
    """Tensors in the bucket's order, each at the next multiple of 16 bytes.

    Example: float32 tensors of shape (3,) and (5,) start at 0 and 16, and the bucket has 48 bytes.
    """
    offsets = []
    end = 0
    for entry in bucket:
        offsets.append(end)
        end = _aligned(end + tensor_bytes(entry))
    return BucketLayout(size=end, offsets=tuple(offsets))


def checksum(bucket: NDArray[np.uint8]) -> int:
    """The sum of a bucket (uint8 [a multiple of 16]) read as int64, without its overflow; other threads run meanwhile.

    One pass at the speed of the memory: a sum of int32 in int64 takes four times as long.
    """
    return int(bucket.view(np.int64).sum())


def empty_bucket(size: int) -> NDArray[np.uint8]:
    """Memory for `size` bytes, with any content.

    NumPy asks the kernel for huge pages, torch does not: faults of 4 KiB each take longer than the bytes on their way.
    """
    return np.empty(size, np.uint8)


def cut_buckets(entries: list[TensorEntry], target_bytes: int) -> tuple[tuple[TensorEntry, ...], ...]:
    """Whole tensors in order, a new bucket before `target_bytes` would be exceeded; a larger tensor gets its own."""
    buckets: list[list[TensorEntry]] = []
    filled = 0
    for entry in entries:
        size = _aligned(tensor_bytes(entry))
        if not buckets or filled + size > target_bytes:
            buckets.append([])
            filled = 0
        buckets[-1].append(entry)
        filled += size
    return tuple(tuple(bucket) for bucket in buckets)
