"""NCCL: a member of a group dies or stops, and the others notice, leave at once and form the next group.

The cases are those of tests/rollout/test_broken_groups.py. No watchdog may end a survivor of a weight sync; that of the
learner's ranks may.
"""

from __future__ import annotations

import pytest
import torch

from tests.gpu.needs import needs
from tests.harness.broken_groups import FALLS, Fall, check_ranks, check_weights

pytestmark = [*needs(2, nccl=True), pytest.mark.timeout(900)]


def world() -> int:
    """NCCL has one rank per device."""
    return min(3, torch.cuda.device_count())


@pytest.mark.parametrize("fall", FALLS)
def test_survivors_of_a_weight_sync_form_the_next_group(fall: Fall) -> None:
    check_weights("nccl", world(), fall)


@pytest.mark.parametrize("fall", FALLS)
def test_ranks_end_within_the_deadline(fall: Fall) -> None:
    check_ranks("nccl", world(), fall)
