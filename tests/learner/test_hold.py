"""What has to happen before the policy changes: the trainer waits for it once, with the policy as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from learner.training.process_group import Ranks
from tests.learner.cases import Case, open_trainer, step_data

pytestmark = [
    pytest.mark.filterwarnings(f"ignore::{kind}:(torch|deepspeed)") for kind in ("DeprecationWarning", "FutureWarning")
]


def test_the_policy_changes_only_after_the_hold(policy: Path, ranks: Ranks) -> None:
    trainer, (batch, payloads) = open_trainer(policy, Case("hold"), ranks), step_data(policy, "uneven")
    weight = next(trainer.causal_lm.parameters())
    first, held = weight.detach().clone(), []

    def hold() -> None:
        assert trainer.between_steps
        held.append(torch.equal(weight, first))

    trained = trainer.train(trainer.plan(batch), payloads, before_update=hold)
    assert trained.optimizer_steps > 0
    assert held == [True], "once, and before the first update"
    assert not torch.equal(weight, first)
    trainer.close()
