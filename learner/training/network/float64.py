"""Owns how a float64 model computes in float64 throughout: many layers, such as norms, convert their input to float32.

Must not change a model of another dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class _NoRounding(TorchFunctionMode):
    """Inside this mode, converting a float64 tensor to float32 returns it in float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (Tensor.to, Tensor.float, Tensor.type) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            args = tuple(_widened(argument) for argument in args)
            kwargs = {name: _widened(argument) for name, argument in kwargs.items()}
        return func(*args, **kwargs)


def _widened(argument: Any) -> Any:
    return torch.float64 if argument is torch.float32 else argument


def keep_float64(model: nn.Module) -> None:
    """Make the layers of a float64 `model` compute in float64, in place, even when the backward pass runs them again.

    Without this, the gradient of a prompt depends, in the seventh digit, on how many responses share its row.
    """
    for layer in model.modules():
        if not any(layer.children()):
            layer.forward = partial(_without_rounding, layer.forward)


def _without_rounding(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _NoRounding():
        return forward(*args, **kwargs)
