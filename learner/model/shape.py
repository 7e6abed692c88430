"""Owns the size of a model, computed without its weights: parameters, and the KV cache entries per token.

Must not load weights or allocate memory for them.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from learner.model.source import ModelSourceError, model_folder, packaged_gguf
from services.settings import ModelSettings
from services.storage.folders import local_copy
from services.storage.hub.address import is_hub
from services.storage.hub.copies import hub_config
from services.storage.models import local_model
from services.storage.places import is_remote

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelShape:
    """`parameters`: elements, with tied tensors counted once; `largest`: those of the largest tensor.

    `kv_values`: keys and values per token, all layers. `heads`: attention heads of a layer, 0 without attention.
    """

    name: str
    parameters: int
    layers: int
    hidden: int
    vocabulary: int
    kv_values: int
    largest: int = 0
    heads: int = 0


def model_shape(model: ModelSettings, cache: Path) -> ModelShape:
    """The shape of the model of a recipe, from its folder, its package, or else from `model.architecture`.

    Takes seconds: transformers builds the network on the meta device. Raises ModelSourceError.
    """
    return _shape(_config(model, cache))


def folder_shape(folder: Path) -> ModelShape | None:
    """The shape of the model in a Hugging Face folder; None, with a warning, if its config does not state it."""
    from transformers import AutoConfig

    try:
        return _shape(AutoConfig.from_pretrained(folder, local_files_only=True))
    except Exception:  # each architecture's config has errors of its own
        log.warning("the size of the model in %s is not known, so its memory is not checked", folder, exc_info=True)
        return None


def recorded_shape(model: ModelSettings, name: str, cache: Path) -> ModelShape | None:
    """The shape of a run's model, by its `name` in the record; of one in a store only its config.json is fetched.

    None if its config does not state it. Raises ModelSourceError, ModelUnavailableError, StoreError, OSError.
    """
    return model_shape(model, cache) if is_remote(name) else folder_shape(local_model(name, cache))


def _shape(config: Any) -> ModelShape:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config)
    text = config.get_text_config()
    # Recurrent models have no attention heads, and keep no keys and values per token.
    attention = getattr(text, "num_attention_heads", 0)
    heads = getattr(text, "num_key_value_heads", None) or attention
    head = getattr(text, "head_dim", None) or (text.hidden_size // attention if attention else 0)
    return ModelShape(
        name=str(config.model_type),
        parameters=sum(parameter.numel() for parameter in network.parameters()),
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        vocabulary=text.vocab_size,
        kv_values=2 * text.num_hidden_layers * heads * head,
        largest=max(parameter.numel() for parameter in network.parameters()),
        heads=attention,
    )


def _remote_config(path: str, cache: Path) -> Path:
    """A local folder with the config.json of a model in a store or the hub, without its weights. Raises StoreError."""
    if is_hub(path):
        return hub_config(path, cache)
    return local_copy(f"{path.rstrip('/')}/config.json", "model.path", cache).parent


def _read_config(folder: Path, shown: str) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # noqa: BLE001 - each architecture's config has errors of its own, which quote it
        expected = f"expected a config.json that transformers can read ({type(error).__name__})"
        raise ModelSourceError(f"model.path: {shown[:200]!r} is not valid: {expected}") from None


def _config(model: ModelSettings, cache: Path) -> Any:
    from transformers import AutoConfig

    elsewhere = is_remote(model.path) or is_hub(model.path)
    folder = _remote_config(str(model.path), cache) if elsewhere else model_folder(model, cache)
    if (folder / "config.json").is_file():
        return _read_config(folder, str(model.path or model.package))
    if model.architecture is not None:
        fields = model.architecture.model_dump(exclude={"model_type"})
        try:
            return AutoConfig.for_model(model.architecture.model_type, **fields)
        except ValueError as error:
            raise ModelSourceError(
                f"model.architecture.model_type: {model.architecture.model_type!r} is not valid: "
                f"expected the type of a causal LM in transformers; {str(error).splitlines()[0]}"
            ) from None
    if model.package is not None:
        gguf = packaged_gguf(model.package)
        return AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    raise ModelSourceError(
        f"model.path: {model.path!r} is not valid: expected a Hugging Face model folder or ORG/NAME@REVISION, "
        "or model.architecture in addition; it has no config.json"
    )
