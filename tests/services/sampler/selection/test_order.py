"""Which kept group is trained first, by setting."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.sampler.selection.order import CONSUMPTION, Waiting, in_order
from services.settings.sampling import DynamicSamplingSettings

pytestmark = pytest.mark.conformance(
    formula="order in which kept groups are trained",
    setting="dynamic_sampling.consumption",
)

# Kept in the order a, b, c, d.
QUEUE = [Waiting("c", 5, 3), Waiting("a", 7, 1), Waiting("d", 5, 4), Waiting("b", 6, 2)]


def test_every_order_of_the_settings_has_its_rule() -> None:
    assert set(CONSUMPTION) == set(get_args(DynamicSamplingSettings.model_fields["consumption"].annotation))


@pytest.mark.parametrize(("order", "expected"), [("oldest_first", "cdba"), ("newest_first", "abdc"), ("fifo", "abcd")])
def test_orders(order: str, expected: str) -> None:
    assert "".join(in_order(order, QUEUE)) == expected


@given(queue=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 99)), unique_by=lambda kept: kept[1]))
@pytest.mark.parametrize("order", CONSUMPTION)
def test_the_order_of_training_ignores_the_order_of_input(order: str, queue: list[tuple[int, int]]) -> None:
    waiting = [Waiting(f"g{kept}", version, kept) for version, kept in queue]
    names = in_order(order, waiting)
    assert sorted(names) == sorted(group.name for group in waiting)
    assert in_order(order, reversed(waiting)) == names
