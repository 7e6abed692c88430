"""Owns the program of a warm parent, `python -m verifier.sandbox.server PARENT SOCKET`: it forks judging processes.

Must not read a text: only the processes that it forks do.

Its standard input holds a document: the verifier's kind, and for a function of the user's its name and files. It loads
the verifier, is confined, and sends one line on the socket: the gaps of its confinement, or why it cannot judge. For
each message with two pipes it forks a judging process with them and answers with its id and its descriptor.
A built-in verifier is loaded before the confinement, a function of the user's in it.
"""

from __future__ import annotations

import gc
import json
import os
import select
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any

from verifier.processes.prctl import die_with
from verifier.sandbox.child import REASON_CHARACTERS, judge_requests
from verifier.sandbox.confinement import confine, confine_further
from verifier.verifiers.loading import load_function, preload
from verifier.verifiers.registry import apart, judge_with

LOOK_MS = 1000
"""How long a judging process that has ended stays a zombie at most."""


def main(arguments: Sequence[str]) -> int:
    """Fork judging processes until the socket is closed. `arguments`: the parent's process id, the socket's number."""
    parent, control = int(arguments[0]), socket.socket(fileno=int(arguments[1]))
    setup = json.loads(sys.stdin.buffer.read())
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1):
        os.dup2(nothing, standard)
    try:
        die_with(parent)
        preload(setup["kind"])
        gaps = confine()
        further = confine_further()
        if setup["kind"] == "python":
            os.dup2(nothing, 2)  # what its file prints is lost; what it raises is sent
        function = load_function(setup["function"], setup["files"]) if setup["kind"] == "python" else None
        alone = apart(setup["kind"])
    except BaseException as error:  # noqa: BLE001 - sent to the parent, which raises it; the user's file may exit
        _send(control, refused=f"{type(error).__name__}: {error}"[:REASON_CHARACTERS])
        return 1
    os.dup2(nothing, 2)  # a judged text must not write into the log
    gc.freeze()  # a collection would copy the pages that judging processes share with this one
    _send(control, gaps=gaps, apart=alone)
    _serve(control, lambda request: judge_with(function, setup["files"], request), further)
    return 0


def _serve(control: socket.socket, judge: Callable[[Any], Any], further: Callable[[], None]) -> None:
    readable, server = select.poll(), os.getpid()
    readable.register(control, select.POLLIN)
    while True:
        if readable.poll(LOOK_MS):
            message, pipes, _, _ = socket.recv_fds(control, 16, 2)
            if not message:
                return
            try:
                child = os.fork()
            except OSError as error:  # no more processes in this container
                _send(control, refused=f"{error}")
            else:
                if child == 0:
                    control.close()
                    os._exit(_judge(server, pipes, judge, further))
                _announce(control, child)
            for pipe in pipes:
                os.close(pipe)
        _reap()


def _announce(control: socket.socket, child: int) -> None:
    try:
        descriptor = os.pidfd_open(child)
    except (AttributeError, OSError):  # another system, an old kernel, or a container that denies it
        _send(control, pid=child)
        return
    socket.send_fds(control, [json.dumps({"pid": child}).encode() + b"\n"], [descriptor])
    os.close(descriptor)


def _judge(server: int, pipes: list[int], judge: Callable[[Any], Any], further: Callable[[], None]) -> int:
    """The life of a judging process; its exit status."""
    with os.fdopen(pipes[0], "rb") as requests, os.fdopen(pipes[1], "wb", buffering=0) as replies:
        die_with(server)
        further()
        judge_requests(requests, replies, judge)
    return 0


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def _send(control: socket.socket, **fields: object) -> None:
    socket.send_fds(control, [json.dumps(fields).encode() + b"\n"], [])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
