"""Owns the first process of a jail: one process per test, limits, and results for the service outside.

Must not hold an expected value: each process of a program is a copy of this one. A checker reads its test itself.

Frames on both pipes are four bytes of length and then JSON. The first frame in is the program with its limits, each
later one a test; a checked test is followed by one more frame, which only the checker reads.
"""

from __future__ import annotations

import json
import os
import select
import signal
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from verifier.programs.inside import checker, solution
from verifier.programs.inside.confined import (
    PR_SET_CHILD_SUBREAPER,
    PR_SET_DUMPABLE,
    PR_SET_PDEATHSIG,
    filter_calls,
    limit_resources,
    restrict_files,
    set_process,
)
from verifier.programs.inside.watching import empty, ended_cpu_s, kill_all, overfull, reap, usage

LOOK_EVERY_S = 0.02
HIGHEST_DESCRIPTOR = 1024
PIECE = 65536
STANDARD, RESULT, CHECKS = ("stdout", "stderr"), "result", "checks"
BEGUN = b"."


def main() -> None:
    """Judge until standard input ends, or a limit of the whole program is reached."""
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE):  # the first process ignores signals without handler
        signal.signal(name, signal.SIG_IGN if name == signal.SIGPIPE else signal.SIG_DFL)
    with open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")
    program = json.loads(_frame())
    if not program["alone"]:
        set_process(PR_SET_CHILD_SUBREAPER, 1)
        set_process(PR_SET_PDEATHSIG, signal.SIGTERM)
        signal.signal(signal.SIGTERM, _stop)
    set_process(PR_SET_DUMPABLE, 0)  # no process of the program can read or trace this one
    program["filter"] = bytes.fromhex(program["filter"])
    supervisor = Supervisor(program)
    write_frame({"ready": True})
    while frame := _frame():
        write_frame(supervisor.run(json.loads(frame)))


def _stop(number: int, at: object) -> NoReturn:
    kill_all(alone=False)
    os._exit(0)


class Supervisor:
    """Runs the tests of one program, one after another, within the limits of all of them together."""

    def __init__(self, program: Mapping[str, Any]) -> None:
        self._program = program
        self._limits: Mapping[str, Any] = program["limits"]
        self._alone = bool(program["alone"])
        self._until = time.monotonic() + self._limits["wall_s"]

    def run(self, case: Mapping[str, Any]) -> dict[str, object]:
        """Run one test; returns what its processes wrote, its exit status, and the exceeded limit ('' if none)."""
        watched = _Watched(int(self._limits["output_bytes"]) + int(case.get("room", 0)))
        requests, replies = os.pipe(), os.pipe()
        checked = case["kind"] == "checked"
        if checked:  # first: a program's process is a copy of this one, which must never have read the test
            self._start_checker(requests[1], replies[0], watched)
        main = self._start_program(case, requests[0], replies[1], watched)
        for end in (*requests, *replies):
            os.close(end)
        watched.unsent = case.get("stdin", "").encode(errors="surrogatepass")
        status, limit = self._watch(main, watched, checked)
        kill_all(self._alone)
        watched.read_rest()
        empty(self._program["folders"])
        found = {name: text.decode(errors="backslashreplace") for name, text in watched.texts.items()}
        return {**found, "limit": limit or watched.exceeded, "status": status}

    def _start_checker(self, requests: int, replies: int, watched: _Watched) -> None:
        read, write = os.pipe()

        nothing = os.open(os.devnull, os.O_RDWR)
        kept = (0, nothing, nothing, requests, replies, write)

        def process() -> NoReturn:
            job = _frame()
            os.dup2(1, 0)
            self._confine()
            _begin(len(kept))
            checker.check(job, int(self._limits["output_bytes"]))

        _fork(process, kept)
        os.close(nothing)
        os.close(write)
        watched.add(CHECKS, read)

    def _start_program(self, case: Mapping[str, Any], requests: int, replies: int, watched: _Watched) -> int:
        read = {name: os.pipe() for name in (*STANDARD, RESULT)}
        given, sent = os.pipe()
        results = replies if case["kind"] == "checked" else read[RESULT][1]

        kept = (given, *(read[name][1] for name in STANDARD), results, requests)

        def process() -> NoReturn:
            os.setsid()
            self._confine()
            _begin(len(kept))
            solution.KINDS[case["kind"]](self._program, case)

        main = _fork(process, kept)
        os.close(given)
        watched.send_to(sent)
        for name, (end, other) in read.items():
            os.close(other)
            watched.add(name, end)
        return main

    def _confine(self) -> None:
        left_s = int(self._limits["cpu_s"] - ended_cpu_s()) + 2
        limit_resources({**self._limits["resources"], "RLIMIT_CPU": max(1, left_s)})
        restrict_files(self._program["readable"], [*self._program["folders"], os.devnull])
        os.chdir(self._program["folders"][0])
        filter_calls(self._program["filter"])

    def _watch(self, main: int, watched: _Watched, checked: bool) -> tuple[int | None, str]:
        """Wait until the test has ended; returns the status of the program's first process and the exceeded limit."""
        looked, status = 0.0, None
        ended = os.pidfd_open(main)
        try:
            while True:
                watched.exchange(ended if status is None else None, LOOK_EVERY_S)
                status = reap().get(main, status)
                if not watched.is_open(CHECKS) if checked else status is not None:
                    return status and os.waitstatus_to_exitcode(status), ""
                if watched.exceeded:
                    return None, watched.exceeded
                if (now := time.monotonic()) >= looked + LOOK_EVERY_S:
                    looked = now
                    if limit := self._exceeded(now):
                        return None, limit
        finally:
            os.close(ended)
            watched.stop_sending()

    def _exceeded(self, now: float) -> str:
        used, limits = usage(self._alone), self._limits
        reached = {
            "wall": now >= self._until,
            "cpu": used.cpu_s >= limits["cpu_s"],
            "processes": used.processes > limits["processes"],
            "memory": used.memory_mib > limits["memory_mib"],
            "tmp": overfull(self._program["folders"], limits["tmp_mib"]) if self._alone else False,
        }
        return next((name for name, exceeded in reached.items() if exceeded), "")


class _Watched:
    """The pipes of a test's processes; reads at most `most` bytes of them together."""

    def __init__(self, most: int) -> None:
        self.texts: dict[str, bytearray] = {}
        self.exceeded = ""
        self.unsent = b""
        self._input: int | None = None
        self._most = most
        self._open: dict[int, str] = {}

    def is_open(self, name: str) -> bool:
        """Whether a process can still write into that pipe."""
        return name in self._open.values()

    def add(self, name: str, descriptor: int) -> None:
        """Read this pipe as `name`."""
        self.texts[name] = bytearray()
        self._open[descriptor] = name
        os.set_blocking(descriptor, False)

    def send_to(self, descriptor: int) -> None:
        """Write `unsent` into this pipe."""
        self._input = descriptor
        os.set_blocking(descriptor, False)

    def exchange(self, ended: int | None, patience_s: float) -> None:
        """Read and write what is possible; return at once when the process behind the descriptor `ended` has ended."""
        if not self.unsent:
            self.stop_sending()
        poll = select.poll()
        for descriptor in (*self._open, *([] if ended is None else [ended])):
            poll.register(descriptor, select.POLLIN)
        if self._input is not None:
            poll.register(self._input, select.POLLOUT)
        for descriptor, _ in poll.poll(patience_s * 1000):
            if descriptor in self._open:
                self._read(descriptor)
            elif descriptor == self._input:
                self._send(descriptor)

    def read_rest(self) -> None:
        """Read what is left in the pipes after all processes have ended, and close them."""
        while self._open:
            for descriptor in list(self._open):
                self._read(descriptor)

    def stop_sending(self) -> None:
        """Close the program's input."""
        if self._input is not None:
            os.close(self._input)
            self._input = None

    def _read(self, descriptor: int) -> None:
        try:
            part = os.read(descriptor, PIECE)
        except BlockingIOError:
            return
        taken = sum(map(len, self.texts.values()))
        self.texts[self._open[descriptor]] += part[: max(0, self._most - taken)]
        if taken + len(part) > self._most:
            self.exceeded = "output"
        if not part:
            del self._open[descriptor]
            os.close(descriptor)

    def _send(self, descriptor: int) -> None:
        try:
            self.unsent = self.unsent[os.write(descriptor, self.unsent[:PIECE]) :]
        except BrokenPipeError:  # the program does not read it
            self.unsent = b""


def _fork(process: Callable[[], NoReturn], kept: Sequence[int]) -> int:
    """Run `process` in a new process, with the descriptors `kept` as its 0, 1, 2, ... and no others.

    Returns its id once it is confined and has called `_begin`. Raises RuntimeError when it ended before that.
    """
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            _renumber([*kept, write])
            process()
        except BaseException as error:  # noqa: BLE001 - this copy of the supervisor must end here
            os.write(len(kept), f"{type(error).__name__}: {error}".encode(errors="backslashreplace"))
        finally:
            os._exit(1)
    os.close(write)
    begun = os.read(read, PIECE)
    os.close(read)
    if begun != BEGUN:
        raise RuntimeError(f"a process of a test could not be confined: {begun.decode() or 'it ended'}")
    return child


def _begin(descriptor: int) -> None:
    """Report that this process is confined."""
    os.write(descriptor, BEGUN)
    os.close(descriptor)


def _renumber(descriptors: Sequence[int]) -> None:
    """Give this process these descriptors as 0, 1, 2, ..., and close all others."""
    moved = [os.dup(each) for each in descriptors]
    while min(moved) < len(moved):  # out of the way of the final numbers
        moved = [os.dup(each) for each in moved]
    for place, each in enumerate(moved):
        os.dup2(each, place)
    os.closerange(len(moved), HIGHEST_DESCRIPTOR)


def _frame() -> bytes:
    """The next frame of standard input; empty at its end."""
    head = _exactly(4)
    return _exactly(struct.unpack("!I", head)[0]) if len(head) == 4 else b""


def _exactly(count: int) -> bytes:
    """That many bytes of standard input, and none more: they belong to another process. Fewer at its end."""
    parts = []
    while count and (part := os.read(0, min(count, 1 << 20))):
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def write_frame(content: Mapping[str, object]) -> None:
    """Write a frame to the service outside."""
    text = json.dumps(content).encode()
    text = struct.pack("!I", len(text)) + text
    while text:
        text = text[os.write(1, text) :]
