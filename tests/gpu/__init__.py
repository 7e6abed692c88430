"""Owns the tests that need NVIDIA GPUs, and what each of them needs.

Must not be part of `make test`. A test whose needs are not met is skipped, and its reason names them.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist


def needs_devices(count: int) -> pytest.MarkDecorator:
    """Skip the test unless torch finds `count` CUDA devices, and has NCCL."""
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    nccl = "" if dist.is_nccl_available() else f"; torch {torch.__version__} has no NCCL"
    reason = f"not run: needs {count} CUDA devices and NCCL, found {found} devices{nccl}"
    return pytest.mark.skipif(found < count or bool(nccl), reason=reason)
