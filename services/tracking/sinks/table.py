"""Owns which sink belongs to which name in a recipe's section `tracking`.

Must not import a tracker's library; each sink does when it is opened.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from services.tracking.sink import Sink
from services.tracking.sinks.mlflow import MlflowSink
from services.tracking.sinks.tensorboard import TensorBoardSink
from services.tracking.sinks.wandb import WandbSink

SINKS: Mapping[str, Callable[[Any], Sink]] = {
    "tensorboard": TensorBoardSink,
    "mlflow": MlflowSink,
    "wandb": WandbSink,
}
"""By name: what makes a sink from its settings."""
