"""Which kept group is trained first, by setting."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.contracts import Outcome
from services.sampler.groups import GroupTable
from services.sampler.selection.order import CONSUMPTION
from services.settings.sampling import DynamicSamplingSettings
from tests.services.sampler.judged import group_of

pytestmark = pytest.mark.conformance(
    formula="order in which kept groups are trained",
    setting="dynamic_sampling.consumption",
)

# Kept in the order a, b, c, d.
QUEUE = [("c", 5, 3), ("a", 7, 1), ("d", 5, 4), ("b", 6, 2)]


def in_order(consumption: str, kept: list[tuple[str, int, int]], size: int = 100) -> list[str]:
    """The next batch of a table with these kept groups, by name, oldest version and ordinal."""
    table = GroupTable()
    for name, oldest_version, kept_order in kept:
        group = group_of((Outcome.CORRECT, 1, False, oldest_version), (Outcome.WRONG, 1, False, oldest_version + 1))
        group.kept_order = kept_order
        table.restore_kept(name, group)
    return table.next_batch(consumption, size)


def test_every_order_of_the_settings_has_its_rule() -> None:
    assert set(CONSUMPTION) == set(get_args(DynamicSamplingSettings.model_fields["consumption"].annotation))


@pytest.mark.parametrize(("order", "expected"), [("oldest_first", "cdba"), ("newest_first", "abdc"), ("fifo", "abcd")])
def test_orders(order: str, expected: str) -> None:
    assert "".join(in_order(order, QUEUE)) == expected
    assert "".join(in_order(order, QUEUE, 2)) == expected[:2]


@given(queue=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 99)), unique_by=lambda kept: kept[1]))
@pytest.mark.parametrize("order", CONSUMPTION)
def test_the_order_of_training_ignores_the_order_of_input(order: str, queue: list[tuple[int, int]]) -> None:
    waiting = [(f"g{kept}", version, kept) for version, kept in queue]
    names = in_order(order, waiting)
    assert sorted(names) == sorted(name for name, _, _ in waiting)
    assert in_order(order, waiting[::-1]) == names
