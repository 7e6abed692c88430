"""Owns NVIDIA's management library (NVML): the driver, the GPUs' UUIDs, and their errors. The only importer of pynvml.

Must not decide what follows from an error, nor import ray or CUDA: its callers run before an engine does.

Needs the driver. Without it, DevicesUnreadableError says why, and nothing is watched.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

log = logging.getLogger(__name__)

LIBRARY = "pynvml"
CUDA, DRIVER = 13, "R580"
"""The CUDA release of the GPU image (deploy/locks/gpu.lock), and the first driver branch that supports it."""
FATAL_XIDS = {
    46: "the GPU stopped processing",
    48: "a double-bit ECC error",
    62: "the power management unit halted",
    64: "a row or page could not be retired",
    74: "an NVLink error",
    79: "the GPU has fallen off the bus",
    95: "an uncontained memory error",
    119: "the GPU's system processor (GSP) does not answer",
    120: "the GPU's system processor (GSP) failed",
    140: "an ECC error that was not recovered",
}
"""Errors after which the device must be reset, or its node started again, before it is used: NVIDIA's catalogue of Xids
(https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html). Others are faults of one application, such as
13, 31, 43, 45 and the contained 94, or were corrected, such as 63 and 92."""
LOST = 79


class DevicesUnreadableError(RuntimeError):
    """NVML cannot be used here. The text is one line."""


class DeviceFault(NamedTuple):
    """An error of a device: its UUID, the kind (`xid`, `ecc`, `remap`), one line; `fatal`: the device must go."""

    device: str
    kind: str
    text: str
    fatal: bool


@contextlib.contextmanager
def _library() -> Iterator[Any]:
    """NVML, initialised. Raises DevicesUnreadableError for its errors."""
    try:
        nvml = importlib.import_module(LIBRARY)
    except ImportError:
        raise DevicesUnreadableError("the package nvidia-ml-py is not installed") from None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise DevicesUnreadableError(_explained(nvml, error)) from None
    try:
        yield nvml
    except nvml.NVMLError as error:
        raise DevicesUnreadableError(f"NVML: {error}") from None
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def _explained(nvml: Any, error: Exception) -> str:
    if isinstance(error, (nvml.NVMLError_LibraryNotFound, nvml.NVMLError_DriverNotLoaded)):
        return "no NVIDIA driver (libnvidia-ml.so.1 is missing, or its kernel module is not loaded)"
    return f"NVML: {error}"


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def gpu_uuids() -> list[str]:
    """The UUIDs of the GPUs that this machine or pod sees, in their order. Raises DevicesUnreadableError."""
    with _library() as nvml:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        return [_text(nvml.nvmlDeviceGetUUID(handle)) for handle in handles]


def driver_problem(gpus: int) -> str | None:
    """Why `gpus` GPUs cannot be used here, in one line: no driver, an old one, or no device; else None.

    Fewer devices are no fault: slices of one GPU (MIG, time-slicing) count as that GPU.
    """
    expected = f"expected NVIDIA driver {DRIVER} or newer (CUDA {CUDA}) and {gpus} GPUs"
    try:
        with _library() as nvml:
            driver = _text(nvml.nvmlSystemGetDriverVersion())
            cuda, found = nvml.nvmlSystemGetCudaDriverVersion_v2(), nvml.nvmlDeviceGetCount()
    except DevicesUnreadableError as error:
        return f"this node cannot run GPU processes: {error}: {expected}"
    if cuda < CUDA * 1000:
        return (
            f"this node cannot run GPU processes: driver {driver} supports CUDA "
            f"{cuda // 1000}.{cuda % 1000 // 10}: {expected}"
        )
    if not found:
        return f"this node cannot run GPU processes: the pod sees no GPU: {expected}"
    if found < gpus:
        log.warning("NVML sees %d GPUs, the pod requests %d: they may be slices of GPUs", found, gpus)
    return None


class DeviceWatch:
    """The errors of some devices from now on; close it at the end, which waits for a `look` in another thread."""

    def __init__(self, devices: Sequence[str]) -> None:
        """`devices`: their numbers or UUIDs, as in CUDA_VISIBLE_DEVICES. Raises DevicesUnreadableError."""
        self._closing = contextlib.ExitStack()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._said: set[str] = set()
        with contextlib.ExitStack() as opening:
            nvml = self._nvml = opening.enter_context(_library())
            try:
                self._handles = {_text(nvml.nvmlDeviceGetUUID(handle)): handle for handle in map(self._handle, devices)}
                self._ecc = {uuid: self._uncorrected(uuid) for uuid in self._handles}
                self._pending = dict.fromkeys(self._handles, False)
                self._events = nvml.nvmlEventSetCreate()
                opening.callback(self._free)
                self._watched = [uuid for uuid in self._handles if self._register(uuid)]  # those that report Xids
            except (nvml.NVMLError, ValueError) as error:
                raise DevicesUnreadableError(f"NVML: {error}") from None
            self._closing = opening.pop_all()

    def _handle(self, device: str) -> Any:
        by_number = device.isdecimal()
        return (
            self._nvml.nvmlDeviceGetHandleByIndex(int(device))
            if by_number
            else self._nvml.nvmlDeviceGetHandleByUUID(device)
        )

    def _register(self, uuid: str) -> bool:
        """Whether the device reports Xids."""
        done = self._read(
            lambda: (
                self._nvml.nvmlDeviceRegisterEvents(
                    self._handles[uuid], self._nvml.nvmlEventTypeXidCriticalError, self._events
                )
                or True
            )
        )
        if not done:
            log.warning("device %s reports no Xid errors to this process", uuid)
        return bool(done)

    def _free(self) -> None:
        with contextlib.suppress(self._nvml.NVMLError):
            self._nvml.nvmlEventSetFree(self._events)

    def _read(self, call: Callable[[], Any]) -> Any:
        """What NVML reads; None where the device does not support it."""
        try:
            return call()
        except self._nvml.NVMLError_NotSupported:
            return None

    def _uncorrected(self, uuid: str) -> int | None:
        nvml = self._nvml
        kinds = (nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
        found: int | None = self._read(lambda: nvml.nvmlDeviceGetTotalEccErrors(self._handles[uuid], *kinds))
        return found

    def look(self, wait_s: float) -> list[DeviceFault]:
        """The errors since the last call; waits `wait_s` seconds if there is none, less once the watch is closed."""
        with self._lock:
            ends = time.monotonic() + wait_s
            if not (found := self._errors(wait_s)):
                self._closed.wait(max(0.0, ends - time.monotonic()))
            return found

    def _errors(self, wait_s: float) -> list[DeviceFault]:
        found = self._xids(wait_s)
        for uuid in self._handles:
            try:
                found += [*self._new_ecc(uuid), *self._remapping(uuid)]
            except self._nvml.NVMLError_GpuIsLost:
                found.append(DeviceFault(uuid, "xid", f"{uuid}: Xid {LOST}: {FATAL_XIDS[LOST]}", True))
            except self._nvml.NVMLError as error:
                self._warn(f"device {uuid} cannot be read: {error}")
        return found

    def _warn(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            log.warning("%s", text)

    def _xids(self, wait_s: float) -> list[DeviceFault]:
        nvml = self._nvml
        if not self._watched:
            return []
        try:
            event = nvml.nvmlEventSetWait_v2(self._events, math.ceil(wait_s * 1000))
        except nvml.NVMLError_Timeout:
            return []
        except nvml.NVMLError_GpuIsLost:
            return []  # reading each device tells which
        except nvml.NVMLError as error:
            self._warn(f"events of devices cannot be read: {error}")
            return []
        if event.eventType != nvml.nvmlEventTypeXidCriticalError:
            return []
        uuid, xid = self._named(event.device), int(event.eventData)
        what = FATAL_XIDS.get(xid, "see NVIDIA's catalogue of Xids")
        return [DeviceFault(uuid, "xid", f"{uuid}: Xid {xid}: {what}", xid in FATAL_XIDS)]

    def _named(self, handle: Any) -> str:
        try:
            return _text(self._nvml.nvmlDeviceGetUUID(handle))
        except self._nvml.NVMLError:
            log.warning("the device of an event has no UUID any more")
            return next(iter(self._handles))

    def _new_ecc(self, uuid: str) -> list[DeviceFault]:
        before, now = self._ecc[uuid], self._uncorrected(uuid)
        self._ecc[uuid] = now
        if before is None or now is None or now <= before:
            return []
        text = f"{uuid}: {now - before} uncorrected ECC errors, {now} since the driver started"
        return [DeviceFault(uuid, "ecc", text, False)]

    def _remapping(self, uuid: str) -> list[DeviceFault]:
        rows = self._read(lambda: self._nvml.nvmlDeviceGetRemappedRows(self._handles[uuid]))
        if rows is None:
            return []
        _, uncorrectable, pending, failed = rows
        if failed:
            return [DeviceFault(uuid, "remap", f"{uuid}: rows of its memory could not be remapped", True)]
        if pending and not self._pending[uuid]:
            self._pending[uuid] = True
            text = (
                f"{uuid}: a reset is needed to remap its memory ({uncorrectable} rows with uncorrectable errors so far)"
            )
            return [DeviceFault(uuid, "remap", text, False)]
        return []

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        with self._lock:
            self._closing.close()
