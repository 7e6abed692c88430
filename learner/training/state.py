"""Owns the saved state of a trainer: master weights, Adam moments and counters, whole and by parameter name.

Must not know folders or manifests, or run a step.

Each tensor is saved once: parameter i by rank i mod ranks. State written by any number of ranks at any ZeRO stage can
be read by any other number at any other stage.

    master.NAME           the weight that Adam updates: float32, or float64 if learner.dtype is
    exp_avg.NAME          the first moment of Adam, with the same dtype and shape; zeros before the first step of Adam
    exp_avg_sq.NAME       the second moment
    step.NAME             float32 []: the number of Adam steps
    rollout_steps         int64 []: the trained rollout steps, on which the learning rate depends; saved by rank 0
    non_finite_in_a_row   int64 []: see Trainer; saved by rank 0

Training draws no random numbers, so no generator state is saved. This module is written for the DeepSpeed version that
pyproject.toml pins. DeepSpeed's own functions for whole tensors support neither stage 0 nor float64, lose the sign of a
zero when they add fragments, and cannot set a tensor whose length is not divisible by the number of ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from learner.archive import ArchiveError
from learner.training.process_group import Ranks
from learner.training.tensor_files import HostBlock, TensorFiles, TensorLayout

MASTER = "master"
MOMENTS = ("exp_avg", "exp_avg_sq")
KINDS = (MASTER, *MOMENTS)
INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}


class Counters(NamedTuple):
    """The counters of the trainer."""

    rollout_steps: int = 0
    non_finite_in_a_row: int = 0


COUNTERS = dict.fromkeys(Counters._fields, TensorLayout(torch.int64, ()))


class _Optimizer(ABC):
    """Access to the master weights and the Adam state of one ZeRO stage. `named`: the parameters of the policy."""

    stepped: list[Any]
    """The tensors that torch's Adam updates on this rank. It updates all of them or none."""

    def __init__(self, engine: Any, named: Mapping[str, Any], ranks: Ranks) -> None:
        self._engine = engine
        self._named = named
        self._ranks = ranks
        # A tensor has no entry before its first step. Reading uses `get`, because indexing would create an entry.
        self._adam: Any = engine.basic_optimizer.state

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the master weights."""
        found: torch.dtype = self.stepped[0].dtype
        return found

    def steps(self, name: str) -> float:
        """The number of Adam steps of a parameter."""
        return self._steps(self.stepped[0])

    def _steps(self, tensor: Any) -> float:
        held = self._adam.get(tensor)
        return float(held["step"]) if held else 0.0

    def set_steps(self, steps: Mapping[str, float]) -> None:
        """Set the number of Adam steps, by parameter name, and create the moments, so that they can be written."""
        for tensor in self.stepped:
            self._set_steps(tensor, max(steps.values()))

    def _set_steps(self, tensor: Any, steps: float) -> None:
        held = self._adam[tensor]
        for moment in MOMENTS:
            held.setdefault(moment, torch.zeros_like(tensor))
        held["step"] = torch.tensor(steps, dtype=torch.float32, device=tensor.device)

    def read(self, name: str, kind: str, into: Tensor | None, keeper: int) -> None:
        """Copy a whole tensor to `into`, which only rank `keeper` passes. Collective."""
        exists = kind == MASTER or self.steps(name) > 0
        found = self._whole(name, kind, keeper) if exists else torch.zeros(())
        if into is not None:
            into.copy_(found)

    @abstractmethod
    def _whole(self, name: str, kind: str, keeper: int) -> Tensor:
        """Return an existing tensor, whole at least on rank `keeper`. Collective."""

    @abstractmethod
    def write(self, name: str, kind: str, whole: Tensor) -> None:
        """Set this rank's part of a tensor from the `whole` tensor, on the CPU. Call it after `set_steps`."""

    @abstractmethod
    def refresh(self, files: TensorFiles) -> None:
        """Set the parameters to the rounded master weights. Collective."""


class _Replicated(_Optimizer):
    """Stage 0: every rank holds everything. The masters are the parameters, or separate tensors with bfloat16."""

    def __init__(self, engine: Any, named: Mapping[str, Any], ranks: Ranks) -> None:
        super().__init__(engine, named, ranks)
        optimizer = engine.optimizer
        self._masters = dict(named)
        if hasattr(optimizer, "fp32_groups"):
            pairs = zip(chain(*optimizer.fp16_groups), chain(*optimizer.fp32_groups), strict=True)
            beside = {id(parameter): master for parameter, master in pairs}
            self._masters = {name: beside[id(parameter)] for name, parameter in named.items()}
        self.stepped = list(self._masters.values())

    def steps(self, name: str) -> float:
        # At stage 0, Adam never updates a parameter that never had a gradient.
        return self._steps(self._masters[name])

    def set_steps(self, steps: Mapping[str, float]) -> None:
        for name, count in steps.items():
            self._set_steps(self._masters[name], count)

    def _whole(self, name: str, kind: str, keeper: int) -> Tensor:
        master = self._masters[name]
        found: Tensor = master if kind == MASTER else self._adam[master][kind]
        return found

    def write(self, name: str, kind: str, whole: Tensor) -> None:
        self._whole(name, kind, self._ranks.rank).copy_(whole)

    def refresh(self, files: TensorFiles) -> None:
        for name, parameter in self._named.items():
            if parameter is not self._masters[name]:
                parameter.copy_(self._masters[name])


class _Flat(_Optimizer):
    """Stages 1 and 2: all parameters are concatenated, and each rank updates one slice with arbitrary boundaries."""

    def __init__(self, engine: Any, named: Mapping[str, Any], ranks: Ranks) -> None:
        super().__init__(engine, named, ranks)
        optimizer = engine.optimizer
        # With bfloat16 weights at stage 1, DeepSpeed's optimizer is of another class.
        beside = getattr(optimizer, "fp32_groups_flat_partition", None)
        self.stepped = optimizer.single_partition_of_fp32_groups if beside is None else beside

    def _held(self, name: str, kind: str) -> tuple[int, Tensor] | None:
        """(offset, values) of this rank's slice of the flattened tensor; None if the rank holds none of it."""
        mapping = self._named[name]._hp_mapping
        if mapping is None:
            return None
        flat = self.stepped[mapping.param_group_index]
        source = flat if kind == MASTER else self._adam[flat][kind]
        piece = mapping.hp_fragment_address
        return mapping.lp_fragment_address.start, source.narrow(0, piece.start, piece.numel)

    def _whole(self, name: str, kind: str, keeper: int) -> Tensor:
        parameter, held = self._named[name], self._held(name, kind)
        if held and len(held[1]) == parameter.numel() and self._ranks.world == 1:
            return held[1].view(parameter.shape)
        found = torch.zeros(parameter.numel(), dtype=self.dtype, device=parameter.device)
        if held:
            found.narrow(0, held[0], len(held[1])).copy_(held[1])
        # As integers, because 0.0 + -0.0 is 0.0, which would lose the sign.
        dist.reduce(found.view(INTEGERS[self.dtype]), keeper)
        return found.view(parameter.shape)

    def write(self, name: str, kind: str, whole: Tensor) -> None:
        if held := self._held(name, kind):
            held[1].copy_(whole.flatten().narrow(0, held[0], len(held[1])))

    def refresh(self, files: TensorFiles) -> None:
        self._engine.optimizer.update_lp_params()


class _Partitioned(_Optimizer):
    """Stage 3: each parameter is cut into one piece per rank, all of the same size, the last ones padded."""

    def __init__(self, engine: Any, named: Mapping[str, Any], ranks: Ranks) -> None:
        super().__init__(engine, named, ranks)
        self.stepped = engine.optimizer.fp32_partitioned_groups_flat

    def _whole(self, name: str, kind: str, keeper: int) -> Tensor:
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        parameter = self._named[name]
        found: Tensor = (
            safe_get_full_fp32_param(parameter) if kind == MASTER else safe_get_full_optimizer_state(parameter, kind)
        )
        return found

    def write(self, name: str, kind: str, whole: Tensor) -> None:
        from deepspeed.utils import safe_set_local_fp32_param, safe_set_local_optimizer_state

        parameter = self._named[name]
        piece = torch.zeros(parameter.ds_tensor.numel(), dtype=whole.dtype)
        own = whole.flatten()[self._ranks.rank * len(piece) :][: len(piece)]
        piece[: len(own)] = own
        if kind == MASTER:
            safe_set_local_fp32_param(parameter, piece)
        else:
            safe_set_local_optimizer_state(parameter, piece, kind)

    def refresh(self, files: TensorFiles) -> None:
        import deepspeed

        for name, parameter in self._named.items():
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                if self._ranks.rank == 0:
                    parameter.copy_(files[f"{MASTER}.{name}"])


STAGES: tuple[type[_Optimizer], ...] = (_Replicated, _Flat, _Flat, _Partitioned)
"""The implementations by ZeRO stage."""


@torch.no_grad()
def take(engine: Any, named: Mapping[str, Any], stage: int, ranks: Ranks, counters: Counters) -> HostBlock:
    """Copy the part of the engine's state that this rank saves to host memory. Collective.

    `named`: the parameters of the policy by name.
    """
    optimizer = STAGES[stage](engine, named, ranks)
    keepers = {name: index % ranks.world for index, name in enumerate(named)}
    own = {name: parameter for name, parameter in named.items() if keepers[name] == ranks.rank}
    block = HostBlock(_layouts(own, optimizer.dtype) | (COUNTERS if ranks.rank == 0 else {}))
    for name, keeper in keepers.items():
        for kind in KINDS:
            optimizer.read(name, kind, block[f"{kind}.{name}"] if name in own else None, keeper)
    for name in own:
        block[f"step.{name}"].fill_(optimizer.steps(name))
    if ranks.rank == 0:
        for name, count in counters._asdict().items():
            block[name].fill_(count)
    return block


@torch.no_grad()
def put(engine: Any, named: Mapping[str, Any], stage: int, ranks: Ranks, files: TensorFiles) -> Counters:
    """Load into the engine what `take` saved, from the files of all ranks, and return the counters. Collective.

    Raises ArchiveError if the files do not fit the policy.
    """
    optimizer = STAGES[stage](engine, named, ranks)
    _compare(files.layouts(), _layouts(named, optimizer.dtype) | COUNTERS)
    optimizer.set_steps({name: float(files[f"step.{name}"]) for name in named})
    for name in named:
        for kind in KINDS:
            optimizer.write(name, kind, files[f"{kind}.{name}"])
    optimizer.refresh(files)
    return Counters(**{name: int(files[name]) for name in COUNTERS})


def _layouts(named: Mapping[str, Any], dtype: torch.dtype) -> dict[str, TensorLayout]:
    found: dict[str, TensorLayout] = {}
    for name, parameter in named.items():
        # At stage 3 the parameter itself is empty. Its real shape is ds_shape.
        whole = TensorLayout(dtype, tuple(getattr(parameter, "ds_shape", parameter.shape)))
        found |= {f"{kind}.{name}": whole for kind in KINDS} | {f"step.{name}": TensorLayout(torch.float32, ())}
    return found


def _compare(found: Mapping[str, TensorLayout], wanted: Mapping[str, TensorLayout]) -> None:
    """Raise ArchiveError for the first tensor that is missing, different or belongs to no parameter."""
    for name in sorted({*found, *wanted}):
        if found.get(name) != wanted.get(name):
            held, needed = (_text(layouts.get(name)) for layouts in (found, wanted))
            raise ArchiveError(f"checkpoint tensor {name!r}: {held} is not valid: expected {needed} for this policy")


def _text(layout: TensorLayout | None) -> str:
    return "none" if layout is None else f"{str(layout.dtype).removeprefix('torch.')} {list(layout.shape)}"
