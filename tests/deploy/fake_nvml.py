"""Owns a module object with the functions of NVML that Penstock calls, and devices whose errors a test sets.

Must not be used outside tests. test_devices.py also calls the real binding, on a machine without a driver.
"""

# ruff: noqa: N801, N802, N815, N818 - the names are those of the binding
from __future__ import annotations

import time
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

CONSTANTS = {"NVML_MEMORY_ERROR_TYPE_UNCORRECTED": 1, "NVML_VOLATILE_ECC": 0, "nvmlEventTypeXidCriticalError": 8}


class NVMLError(Exception):
    """The class of all errors of the real binding, which has a class of its own for each."""


class NVMLError_LibraryNotFound(NVMLError): ...


class NVMLError_DriverNotLoaded(NVMLError): ...


class NVMLError_NotSupported(NVMLError): ...


class NVMLError_Timeout(NVMLError): ...


class NVMLError_GpuIsLost(NVMLError): ...


@dataclass
class Device:
    """A GPU. `rows`: remapped by correctable and uncorrectable errors, pending, failed."""

    uuid: str
    ecc: int | None = 0
    rows: tuple[int, int, int, int] | None = (0, 0, 0, 0)
    lost: bool = False
    registered: int = 0
    reports: bool = True


@dataclass
class Event:
    device: Device
    eventData: int
    eventType: int = 8


@dataclass
class FakeDriver:
    """A driver with its devices. `events`: those that are not read yet; `calls`: names of starts and ends.

    `broken`: what every wait for an event raises; `waits`: how many there were.
    """

    devices: list[Device]
    driver: str = "580.65.06"
    cuda: int = 13000
    events: list[Event] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    initial: NVMLError | None = None
    broken: NVMLError | None = None
    waits: int = 0

    def module(self) -> ModuleType:
        """The module, as `import pynvml` would give it."""
        found = ModuleType("pynvml")
        for error in (NVMLError, *NVMLError.__subclasses__()):
            setattr(found, error.__name__, error)
        for name in dir(self):
            if name.startswith("nvml"):
                setattr(found, name, getattr(self, name))
        constants = {
            "NVML_MEMORY_ERROR_TYPE_UNCORRECTED": 1,
            "NVML_VOLATILE_ECC": 0,
            "nvmlEventTypeXidCriticalError": 8,
        }
        for name, value in constants.items():
            setattr(found, name, value)
        return found

    def nvmlInit(self) -> None:
        self.calls.append("init")
        if self.initial:
            raise self.initial

    def nvmlShutdown(self) -> None:
        self.calls.append("shutdown")

    def nvmlSystemGetDriverVersion(self) -> str:
        return self.driver

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return self.cuda

    def nvmlDeviceGetCount(self) -> int:
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Device:
        return self.devices[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Device:
        return next(device for device in self.devices if device.uuid == uuid)

    def nvmlDeviceGetUUID(self, device: Device) -> str:
        return device.uuid

    def nvmlDeviceGetTotalEccErrors(self, device: Device, kind: int, counter: int) -> int:
        assert (kind, counter) == (1, 0), "uncorrected, since the driver started"
        return int(self._supported(device, device.ecc))

    def nvmlDeviceGetRemappedRows(self, device: Device) -> tuple[int, int, int, int]:
        rows: tuple[int, int, int, int] = self._supported(device, device.rows)
        return rows

    def _supported(self, device: Device, value: Any) -> Any:
        if device.lost:
            raise NVMLError_GpuIsLost("GPU is lost")
        if value is None:
            raise NVMLError_NotSupported("Not Supported")
        return value

    def nvmlEventSetCreate(self) -> str:
        self.calls.append("events")
        return "set"

    def nvmlEventSetFree(self, events: str) -> None:
        self.calls.append("free")

    def nvmlDeviceRegisterEvents(self, device: Device, kinds: int, events: str) -> None:
        if not device.reports:
            raise NVMLError_NotSupported("Not Supported")
        device.registered = kinds

    def nvmlEventSetWait_v2(self, events: str, timeout_ms: int) -> Event:
        self.waits += 1
        if self.broken:
            raise self.broken
        if self.events:
            return self.events.pop(0)
        time.sleep(min(timeout_ms / 1000, 0.01))
        raise NVMLError_Timeout("Timeout")
