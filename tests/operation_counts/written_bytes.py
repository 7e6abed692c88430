"""Owns a count of the bytes that torch writes, and of the bytes that weight syncs send and receive.

Must not be used outside tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import rollout.channel
from learner.weight_sync import broadcast
from rollout.staging import Staging


class WrittenBytes(TorchDispatchMode):
    """While it is entered, counts the bytes of all tensors that this thread's operations copy or compute: `total`.

    Views write nothing, and neither does an allocation, whose bytes come later, or from the system as zeros.
    """

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        views = any(value.alias_info is not None and not value.alias_info.is_write for value in func._schema.returns)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if given and not views:
            self.total += sum(leaf.nbytes for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor))
        return out


class Traffic:
    """What weight syncs of this process have sent and received, and what receivers have written besides, in bytes."""

    def __init__(self) -> None:
        self.sent = self.received = 0
        self.staging = WrittenBytes()


@contextmanager
def counted_traffic() -> Iterator[Traffic]:
    """Count all that Gloo carries meanwhile, and what the threads that stage weights write."""
    traffic = Traffic()

    class Sending(broadcast.GlooSender):
        def broadcast(self, tensor: torch.Tensor) -> Any:
            traffic.sent += tensor.nbytes
            return super().broadcast(tensor)

    class Receiving(rollout.channel.GlooReceiver):
        def broadcast(self, tensor: torch.Tensor) -> Any:
            traffic.received += tensor.nbytes
            return super().broadcast(tensor)

    run = Staging._run

    def watched(staging: Staging) -> None:
        with traffic.staging:
            run(staging)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(broadcast.BACKENDS, "gloo", Sending)
        patch.setitem(rollout.channel.BACKENDS, "gloo", Receiving)
        patch.setattr(Staging, "_run", watched)
        yield traffic
