"""Owns the program that holds one function: `python -m verifier.remote.functions.host CONTROL PARENT FOLDER FUNCTION`.

Must not see a text: it forks a process for each, which reads the text itself.

Control messages are one JSON document each, on a socket; with each request come two descriptors: the channel of the
text's process, and a pipe on which its keeper says how it ended. The keeper is a process between the two: it has the
deadline, becomes the parent of all that the text's process leaves behind, and kills it, also when the pipe's reader is
gone.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from verifier.processes.prctl import adopt_orphans, deny_inspection, die_with
from verifier.remote.functions.tree import end_descendants, kill_group, restrict_signals
from verifier.remote.functions.worker import Function, described, work

MESSAGE_BYTES = 4096
POLL_S = 0.01


class _NoFunctionError(Exception):
    pass


def main(arguments: Sequence[str]) -> int:
    """Load the function, then fork for each request until the control socket closes."""
    control = socket.socket(fileno=int(arguments[0]))
    control.set_inheritable(False)
    die_with(int(arguments[1]))
    folder, name = Path(arguments[2]), arguments[3]
    gap = _gap()
    try:
        function = _loaded(folder, name)
    except _NoFunctionError as error:
        fault = str(error)
    except BaseException as error:  # noqa: BLE001 - the file's own, SystemExit too
        fault = f"it cannot be imported: {described(error, folder)}"
    else:
        fault = ""
    _tell(control, {"fault": fault[: MESSAGE_BYTES // 4], "gap": gap})
    if fault:
        return 1
    deny_inspection()
    keepers = set[int]()
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, MESSAGE_BYTES, 2)
        if not message:
            break
        channel, ended = descriptors
        limits = json.loads(message)
        keeper = os.fork()
        if keeper == 0:
            control.close()
            _keep(channel, ended, function, folder, limits)
        os.close(channel)
        os.close(ended)
        keepers = {pid for pid in {*keepers, keeper} if _runs(pid)}
        _tell(control, {"keeper": keeper})
    return 0


def _loaded(folder: Path, name: str) -> Function:
    # Files of yours may have the names of our packages.
    for module in [module for module in sys.modules if module.partition(".")[0] in ("services", "verifier")]:
        del sys.modules[module]
    sys.path.insert(0, str(folder))
    sys.dont_write_bytecode = True
    where, _, attribute = name.rpartition(":")
    if where.startswith("./"):
        stem = Path(where).with_suffix("").as_posix().replace("/", ".")
        stem = f"reward_{stem}" if stem in sys.modules else stem  # ./json.py must not replace the library's json
        spec = importlib.util.spec_from_file_location(stem, folder / where)
        assert spec is not None
        assert spec.loader is not None
        module_object = sys.modules[stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module_object)
    else:
        module_object = importlib.import_module(where)
    function = getattr(module_object, attribute, None)
    if not callable(function):
        known = sorted(key for key, value in vars(module_object).items() if callable(value) and key[:1] != "_")
        raise _NoFunctionError(
            f"{where} has no function {attribute}: expected one of {', '.join(known)[:500] or 'none'}"
        )
    found: Function = function
    return found


def _gap() -> str:
    """Why texts cannot be kept from signalling others on this machine, or ''. Tried in a process of its own."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, restrict_signals().encode()[: MESSAGE_BYTES // 4])
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as answer:
        gap = answer.read().decode()
    os.waitpid(child, 0)
    return gap


def _keep(channel: int, ended: int, function: Function, folder: Path, limits: dict[str, float]) -> None:
    """Fork the text's process, end it with all that it started, and say how it ended. Never returns."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setpgid(0, 0)  # it outlives the group of the program, to end its text's processes
        adopt_orphans()
        until = time.monotonic() + limits["wall_s"]
        worker = os.fork()
        if worker == 0:
            die_with(os.getppid())
            os.close(ended)
            work(channel, function, folder, limits["cpu_s"])
        os.close(channel)
        in_time = _awaited(worker, ended, until)
        kill_group(worker)
        _, status, used = os.wait4(worker, 0)
        end = {"in_time": in_time, "code": os.waitstatus_to_exitcode(status), "cpu_s": used.ru_utime + used.ru_stime}
        end["whole"] = end_descendants()
        with suppress(BrokenPipeError):
            os.write(ended, json.dumps(end).encode())
    finally:
        os._exit(0)


def _awaited(worker: int, reader_gone: int, until: float) -> bool:
    """Whether the text's process ended in time, and while a caller waits for it. It is not reaped."""
    watched = select.poll()
    watched.register(reader_gone, 0)  # POLLERR alone
    process = os.pidfd_open(worker) if sys.platform == "linux" else None
    if process is not None:
        watched.register(process, select.POLLIN)
    while (left := until - time.monotonic()) > 0:
        found = dict(watched.poll(1000 * (left if process is not None else min(left, POLL_S))))
        if process in found or (process is None and psutil.Process(worker).status() == psutil.STATUS_ZOMBIE):
            return True
        if reader_gone in found:
            break
    return False


def _runs(keeper: int) -> bool:
    try:
        return os.waitpid(keeper, os.WNOHANG)[0] == 0
    except ChildProcessError:  # the function's module reaped it
        return False


def _tell(control: socket.socket, message: dict[str, Any]) -> None:
    control.sendall(json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
