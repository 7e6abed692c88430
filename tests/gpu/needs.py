"""Owns what a test on GPUs may need, what this machine has, and the rehearsal on a machine without GPUs.

Must not allocate on a device. A test whose needs are not met is skipped, and its reason names them.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

GIB = 2**30
REHEARSAL = "PENSTOCK_REHEARSE_GPU_TESTS"
"""With 1, tests that need one device, and no package that is missing, run on the CPU instead: that shows faults of the
tests, and nothing about GPUs. What only a device can show (its memory) is then left out."""


class Machine(NamedTuple):
    """What this machine has: CUDA devices, the memory of the smallest in bytes, and why there is no device."""

    devices: int
    memory: int
    why: str

    @classmethod
    def found(cls) -> Machine:
        """This machine."""
        if torch.version.cuda is None:
            return cls(0, 0, f"torch {torch.__version__} was built without CUDA")
        if not torch.cuda.is_available():
            return cls(0, 0, f"torch {torch.__version__} finds no driver or no device")
        count = torch.cuda.device_count()
        return cls(count, min(torch.cuda.get_device_properties(index).total_memory for index in range(count)), "")


def rehearsing() -> bool:
    """Whether the CPU stands in for one device."""
    return os.environ.get(REHEARSAL) == "1" and not Machine.found().devices


def device() -> torch.device:
    """The device of the tests that need one."""
    return torch.device("cpu") if rehearsing() else torch.device("cuda", 0)


def shortages(machine: Machine, devices: int, gib: float, nccl: bool, packages: tuple[str, ...]) -> list[str]:
    """What a test needs and `machine` lacks, each as a text."""
    found = []
    if machine.devices < devices:
        why = f" ({machine.why})" if machine.why else ""
        found.append(f"{devices} CUDA device{'s' if devices > 1 else ''}, found {machine.devices}{why}")
    elif machine.memory < gib * GIB:
        found.append(f"{gib:g} GiB on each device, found {machine.memory / GIB:.1f}")
    if nccl and not dist.is_nccl_available():
        found.append(f"NCCL, which torch {torch.__version__} lacks")
    found += [f"the package {name}, which is not installed" for name in packages if find_spec(name) is None]
    return found


def needs(
    devices: int = 1, *, gib: float = 4, nccl: bool = False, packages: tuple[str, ...] = ()
) -> list[pytest.MarkDecorator]:
    """The marks of a test that needs so many CUDA devices with `gib` GiB each, NCCL between them, and packages."""
    machine = Machine.found()
    if devices == 1 and rehearsing():
        machine = Machine(1, int(gib * GIB), "")
    missing = shortages(machine, devices, gib, nccl, packages)
    return [pytest.mark.gpu, pytest.mark.skipif(bool(missing), reason=f"not run: needs {'; '.join(missing)}")]
