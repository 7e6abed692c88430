"""Owns how a network gets its initial weights: from the shards into each parameter's own memory, or by transformers.

Must not know ranks or DeepSpeed: a Place says which part of a parameter this process keeps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from learner.training.network.shards import Shards, open_shards, parameters_with_names

log = logging.getLogger(__name__)


class Placed(NamedTuple):
    """A parameter with memory, but without values: this process fills `part`, its elements from `start` on, flat."""

    parameter: nn.Parameter
    part: Tensor
    start: int


Place = Callable[[nn.Parameter], Placed]
"""Gives a parameter on the meta device its memory."""


def whole(device: torch.device) -> Place:
    """Every parameter whole, on `device`."""

    def place(empty: nn.Parameter) -> Placed:
        parameter = nn.Parameter(torch.empty_like(empty, device=device), empty.requires_grad)
        return Placed(parameter, parameter.detach().view(-1), 0)

    return place


def load_network(folder: Path, dtype: torch.dtype, device: torch.device, place: Place) -> Any:
    """Load a Hugging Face folder as a causal LM in `dtype`, in evaluation mode, equal bit by bit to `from_pretrained`.

    Beside what `place` keeps, the process never holds more than one tensor. If the files do not hold exactly the
    network's parameters, transformers loads all of it to host memory instead, and a warning says why. Collective if
    `place` is. Raises ValueError for damaged files.
    """
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    with open_shards(folder) as shards:
        reason = _unknown_format(folder, config, shards)
        if reason is None and shards is not None:
            network = _without_values(folder, config, dtype)
            reason = _mixed_precision(network, dtype) or shards.mismatch(network)
            if reason is None:
                _fill(network, shards, device, place)
                return network
    log.warning("this rank loads the whole model to host memory, because %s", reason)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")


def _unknown_format(folder: Path, config: Any, shards: Shards | None) -> str | None:
    """Why these files cannot be read directly, or None."""
    reasons = {
        f"{str(folder)!r} has no safetensors files": shards is None,
        "it is quantised": getattr(config, "quantization_config", None) is not None,
        "it consists of several models": bool(config.sub_configs),
        "its code is not part of transformers": bool(getattr(config, "auto_map", None)),
        "its folder has an adapter": (folder / "adapter_config.json").is_file(),
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def _mixed_precision(network: Any, dtype: torch.dtype) -> str | None:
    """Why not all parameters are loaded in one dtype, or None."""
    return "it keeps some of its layers in float32" if network._get_dtype_plan(dtype) else None


def _without_values(folder: Path, config: Any, dtype: torch.dtype) -> Any:
    """The network with its parameters on the meta device. Buffers, which have no values in the files, are computed."""
    from accelerate import init_empty_weights
    from transformers.initialization import no_init_weights

    config.name_or_path = str(folder)
    with init_empty_weights(include_buffers=False), no_init_weights():
        network: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    network.tie_weights()
    network.eval()
    if (folder / "generation_config.json").is_file():
        network.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return network


def _fill(network: nn.Module, shards: Shards, device: torch.device, place: Place) -> None:
    """Give every parameter its memory and its values, one after the other. Collective if `place` is."""
    names, placed = parameters_with_names(network), dict[int, nn.Parameter]()
    for module in network.modules():
        for name, empty in module._parameters.items():
            if empty is None:
                continue
            if id(empty) not in placed:
                parameter, part, start = place(empty)
                shards.read(names[id(empty)][0], start, part)
                placed[id(empty)] = parameter
            module._parameters[name] = placed[id(empty)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
