"""The reference's tolerance accepts rounding only: it rejects a slightly wrong temperature and another version."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rollout.engine import Generation
from services.contracts import VersionSpan
from tests.rollout.reference import Policy, assert_written_by

PROMPT = [2, 4, 30, 31, 32]
RESPONSE = np.random.default_rng(0).integers(7, 107, 100, dtype=np.int32)


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Policy]:
    return {seed: Policy(tmp_path_factory.mktemp("policy"), tied=True, seed=seed) for seed in (0, 1)}


def written(logits: torch.Tensor) -> Generation:
    """The generation as an engine returns it, all of version 0."""
    rows = torch.log_softmax(logits[0, len(PROMPT) - 1 : -1], -1)
    found = rows.gather(1, torch.from_numpy(RESPONSE.astype(np.int64))[:, None])[:, 0].float().numpy()
    return Generation(RESPONSE, found, (VersionSpan(version=0, start=0, end=len(RESPONSE)),), "stop")


@torch.no_grad()
def test_only_rounding_is_tolerated(policies: dict[int, Policy]) -> None:
    ids = torch.tensor([[*PROMPT, *RESPONSE.tolist()]])
    model, other = (policies[seed].model for seed in (0, 1))
    exact = model.double()(ids).logits
    model.float()
    assert_written_by(policies, PROMPT, written(exact))
    for faulty in (exact / 1.001, other(ids).logits):
        with pytest.raises(AssertionError):
            assert_written_by(policies, PROMPT, written(faulty))
