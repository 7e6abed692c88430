"""Owns the limits of a program: what it may use with all its tests, and all its processes, together.

Must not measure or enforce them; the jail does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

KIB = 1024


@dataclass(frozen=True)
class ProgramLimits:
    """Each limit holds for all tests and processes of a program together; `output_kib` for each test.

    `memory_mib` is also the address space of each of its processes. `processes` includes threads, `files` is per
    process, `tmp_mib` is the size of the only folder that it can write.
    """

    cpu_s: float = 10.0
    wall_s: float = 30.0
    memory_mib: int = 1024
    processes: int = 32
    files: int = 64
    output_kib: int = 64
    tmp_mib: int = 64

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1 << 31:
                raise ValueError(f"{field.name}: {value!r} is not valid: expected a number above 0")

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> ProgramLimits:
        """The limits among a reward's options; the defaults for those that are not there. Raises ValueError."""
        names = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in options.items() if name in names})

    def for_supervisor(self) -> dict[str, Any]:
        """What the supervisor in the jail gets: the limits, and the resource limits of each process."""
        resources = {
            "RLIMIT_AS": self.memory_mib << 20,
            "RLIMIT_CORE": 0,
            "RLIMIT_FSIZE": self.tmp_mib << 20,
            "RLIMIT_MEMLOCK": 0,
            "RLIMIT_MSGQUEUE": 0,
            "RLIMIT_NOFILE": self.files,
        }
        return asdict(self) | {"output_bytes": self.output_kib * KIB, "resources": resources}
