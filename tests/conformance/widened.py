"""Owns DeepSpeed's ZeRO with float64 instead of float32, so that gradients can be compared without its rounding.

Must not change what is partitioned, gathered or accumulated, or be used outside tests. Written for the DeepSpeed
version that pyproject.toml pins. Gradients are all-reduced whole, because DeepSpeed reduce-scatters nothing wider than
float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch


@contextmanager
def in_float64() -> Iterator[None]:
    """Engines created and used in the body keep weights, gradients and optimizer state in float64 at every stage."""
    from deepspeed.runtime import base_optimizer, engine
    from deepspeed.runtime.zero import partition_parameters

    wide = torch.float64
    with pytest.MonkeyPatch.context() as patch:
        made = engine.DeepSpeedEngine
        patch.setattr(made, "get_data_types", lambda self: (wide, wide))
        patch.setattr(made, "communication_data_type", property(lambda self: wide, lambda self, asked: None))
        patch.setattr(made, "zero_reduce_scatter", lambda self: False)
        patch.setattr(made, "_do_optimizer_sanity_check", lambda self, optimizer: engine.ZERO_OPTIMIZATION)
        patch.setattr(base_optimizer.ZeROOptimizer, "_configure_master_weights", lambda self, **asked: wide)
        # Stage 3 only checks that it supports this dtype. Existing parameters keep their own.
        zero_init = partition_parameters.InsertPostInitMethodToModuleSubClasses
        patch.setattr(zero_init, "_set_dtype", lambda self, config, dtype: setattr(self, "dtype", torch.float32))
        yield
