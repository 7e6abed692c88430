"""Owns what makes a float64 model compute in float64: many layers, norms above all, round to float32 whatever they get.

Must not change a model of any other dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class _NoRounding(TorchFunctionMode):
    """While it is entered, asking a float64 tensor for float32 gives float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (Tensor.to, Tensor.float, Tensor.type) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            args = tuple(_widened(one) for one in args)
            kwargs = {name: _widened(one) for name, one in kwargs.items()}
        return func(*args, **kwargs)


def _widened(argument: Any) -> Any:
    return torch.float64 if argument is torch.float32 else argument


def keep_float64(model: nn.Module) -> None:
    """Make the layers of a float64 `model` stay in float64 inside, in place; also where a backward pass reruns them.

    Without it a prompt's gradient depends, in the seventh digit, on how many responses share its row.
    """
    for layer in model.modules():
        if not any(layer.children()):
            layer.forward = partial(_without_rounding, layer.forward)


def _without_rounding(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _NoRounding():
        return forward(*args, **kwargs)
