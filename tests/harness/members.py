"""Owns the members of a broadcast group, or of the learner's ranks, as processes that may fall in the middle of it.

Must not know what a test expects. A member does what the test tells it through a pipe, and reports.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import psutil
import torch
import torch.distributed as dist

from learner.training.process_group import Ranks, nccl_failure_policy
from learner.weight_sync.broadcast import BroadcastGroup, Rendezvous
from rollout.channel import Channel
from services.contracts.weight_group import Membership, nccl_environment

HOST = "127.0.0.1"
TENSOR_BYTES = 16 << 20
"""More than the buffers of a connection hold: a sender notices a receiver that stands still."""
TRANSFERS = 6
START_S = 120.0


class Report(NamedTuple):
    """How a call ended: seconds of its last blocking part, and the error; '' if there was none."""

    seconds: float
    error: str


class Plan(NamedTuple):
    """What a member takes part in. `timeout_s`: of each blocking call."""

    backend: str
    generation: int
    rank: int
    world: int
    port: int
    timeout_s: float

    @property
    def device(self) -> torch.device:
        """A device of its own, as NCCL demands."""
        return torch.device("cuda", self.rank) if self.backend == "nccl" else torch.device("cpu")


def _fall(how: signal.Signals) -> None:
    os.kill(os.getpid(), how)


class Weights:
    """A member of broadcast groups: the learner as rank 0, else a receiver."""

    def __init__(self) -> None:
        self._rendezvous: Rendezvous | None = None
        self._group: BroadcastGroup | Channel | None = None
        torch.zeros(TENSOR_BYTES)  # torch's own threads

    def serve(self, backend: str, timeout_s: float) -> int:
        """Host the store of groups; returns its port."""
        os.environ.update(nccl_environment(timeout_s))
        self._rendezvous = Rendezvous(HOST, backend, timeout_s)
        return self._rendezvous.port

    def fall(self, moment: str, how: signal.Signals) -> None:
        """From now on, end or stop this process: between meeting and connecting, or in the second transfer."""
        meet, begin, transfers = Membership.meet, Membership.begin, [0]

        def meet_and_fall(self: Membership[Any], store: Any) -> None:
            meet(self, store)
            _fall(how)

        def begin_or_fall(self: Membership[Any], start: Any) -> Any:
            transfers[0] += 1
            if transfers[0] == 2:
                _fall(how)
            return begin(self, start)

        if moment == "forming":
            Membership.meet = meet_and_fall  # type: ignore[method-assign]
        else:
            Membership.begin = begin_or_fall  # type: ignore[method-assign]

    def take_part(self, plan: Plan) -> Report:
        """Form the group, and send or receive."""
        os.environ.update(nccl_environment(plan.timeout_s))
        started = time.monotonic()
        try:
            move = self._form(plan)
            for number in range(TRANSFERS):
                started = time.monotonic()
                tensor = torch.full((TENSOR_BYTES,), number if plan.rank == 0 else 255, dtype=torch.uint8)
                if plan.rank:
                    tensor = tensor.to(plan.device)
                move(tensor)
                if int(tensor[-1]) != number:
                    return Report(0.0, f"transfer {number} brought {int(tensor[-1])}")
        except RuntimeError as error:
            return Report(time.monotonic() - started, f"{type(error).__name__}: {error}")
        return Report(time.monotonic() - started, "")

    def _form(self, plan: Plan) -> Callable[[torch.Tensor], None]:
        if plan.rank == 0:
            assert self._rendezvous is not None
            group = self._group = self._rendezvous.group(plan.generation, plan.world)
            group.form()
            return group.send
        channel = self._group = Channel(
            plan.backend, plan.generation, plan.rank, plan.world, plan.timeout_s, plan.device
        )
        channel.join(HOST, plan.port)
        return channel.receive

    def abort(self) -> float:
        """Leave the group; returns the seconds it took."""
        assert self._group is not None
        started = time.monotonic()
        self._group.abort()
        self._group = None
        return time.monotonic() - started

    def held(self) -> tuple[list[str], list[str]]:
        """The names of this process's threads, and its connections, without those that its store has accepted."""
        threads = []
        for thread in os.listdir("/proc/self/task"):
            try:
                with open(f"/proc/self/task/{thread}/comm") as name:
                    threads.append(name.read().strip())
            except OSError:
                continue  # it has ended
        served = self._rendezvous.port if self._rendezvous else 0
        connections = psutil.Process().net_connections()
        others = [f"{found.laddr} {found.raddr}" for found in connections if found.laddr.port != served]
        return sorted(threads), others


class RankMember:
    """A rank of a learner."""

    def fall(self, moment: str, how: signal.Signals) -> None:
        """See Weights."""
        init, reduce, calls = dist.init_process_group, Ranks.all_reduce, [0]

        def fall_or_init(*arguments: Any, **named: Any) -> None:
            _fall(how)
            init(*arguments, **named)

        def fall_or_reduce(*arguments: Any, **named: Any) -> Any:
            calls[0] += 1
            if calls[0] == 2:
                _fall(how)
            return reduce(*arguments, **named)

        if moment == "forming":
            dist.init_process_group = fall_or_init
        else:
            Ranks.all_reduce = fall_or_reduce  # type: ignore[method-assign]

    def take_part(self, plan: Plan) -> Report:
        """Join the ranks, and reduce a tensor with them: on the device with NCCL."""
        os.environ.update(nccl_failure_policy(plan.timeout_s))
        started = time.monotonic()
        try:
            if plan.device.type == "cuda":
                os.environ["CUDA_VISIBLE_DEVICES"] = str(plan.rank)
            ranks = Ranks(plan.rank, plan.world, HOST, plan.port, plan.timeout_s, meet_s=START_S)
            for _ in range(TRANSFERS):
                started = time.monotonic()
                found = ranks.all_reduce(torch.ones(1 << 20, device=ranks.device))
                if int(found[-1]) != plan.world:
                    return Report(0.0, f"the sum over {plan.world} ranks is {int(found[-1])}")
        except RuntimeError as error:
            return Report(time.monotonic() - started, f"{type(error).__name__}: {error}")
        return Report(time.monotonic() - started, "")


ROLES: dict[str, type] = {"weights": Weights, "rank": RankMember}


def _obey(pipe: Any, role: str) -> None:
    member = ROLES[role]()
    while True:
        name, arguments = pipe.recv()
        pipe.send(getattr(member, name)(*arguments))


class Member:
    """A member's process, as the test sees it. It is forked from a server that has imported everything."""

    def __init__(self, role: str) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._pipe, end = context.Pipe()
        self._process = context.Process(target=_obey, args=(end, role), daemon=True)
        self._process.start()
        end.close()

    def tell(self, name: str, *arguments: Any) -> None:
        """Have it call one of its methods."""
        self._pipe.send((name, arguments))

    def answer(self, deadline_s: float = START_S) -> Any:
        """What its last call returned. Raises EOFError if it has died, TimeoutError after the deadline."""
        if not self._pipe.poll(deadline_s):
            raise TimeoutError(f"process {self._process.pid} did not answer within {deadline_s:g} s")
        return self._pipe.recv()

    def ask(self, name: str, *arguments: Any) -> Any:
        """Both."""
        self.tell(name, *arguments)
        return self.answer()

    def stopped(self) -> bool:
        """Whether it has stopped itself."""
        return psutil.Process(self._process.pid).status() == psutil.STATUS_STOPPED

    def end(self) -> None:
        """Kill it, stopped or not."""
        self._process.kill()
        self._process.join(10)
