"""Owns the settings of the value head, which `algorithm.advantage: gae` trains beside the policy (PPO).

Must not hold a formula; learner.algorithm.values does.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from services.settings.base import Section


class ValueSettings(Section):
    """A linear head on the policy's last hidden states that predicts the reward of a response at each token.

    `discount` and `gae_lambda`: gamma and lambda of GAE (arXiv 1506.02438). `whiten`: advantages are scaled to mean 0
    and variance 1 over all trained tokens of the batch. `clip`: how far a value may move from the one at the start of
    the rollout step before its loss is clipped. `coefficient`: the weight of the value loss beside the objective; its
    gradient reaches the policy's layers too. `learning_rate`: that of the head alone; it has the policy's warm-up.
    """

    discount: Annotated[float, Field(ge=0, le=1)] = 1.0
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 0.95
    whiten: bool = True
    clip: Annotated[float, Field(gt=0)] = 0.2
    coefficient: Annotated[float, Field(gt=0)] = 0.1
    learning_rate: Annotated[float, Field(gt=0)] = 1e-5
