"""Which kept group is trained first, by setting, and the shuffle of a batch."""

from __future__ import annotations

from random import Random
from statistics import fmean
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.contracts import Outcome
from services.sampler.groups import GroupTable
from services.sampler.selection.order import CONSUMPTION, shuffled
from services.settings.algorithm.sampling import DynamicSamplingSettings
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


@given(count=st.integers(0, 40), seed=st.integers(0, 2**31), step=st.integers(1, 10**6), draw=st.randoms())
def test_a_shuffle_ignores_the_order_of_completion(count: int, seed: int, step: int, draw: Random) -> None:
    names = [f"g{number:08d}" for number in range(count)]
    expected = shuffled(names, seed, step)
    assert sorted(expected) == names
    draw.shuffle(names)
    assert shuffled(names, seed, step) == expected


def test_a_shuffle_differs_by_seed_and_step_and_has_no_pattern() -> None:
    """The mean position of each of 32 groups over 400 steps is that of a uniform permutation: 15.5 +- 4 x 0.46."""
    names = [f"g{number:08d}" for number in range(32)]
    orders = [shuffled(names, 7, step) for step in range(1, 401)]
    assert len({tuple(order) for order in orders}) == 400
    assert shuffled(names, 8, 1) not in orders
    means = [fmean(order.index(name) for order in orders) for name in names]
    assert all(abs(mean - 15.5) < 4 * 0.46 for mean in means)


def test_groups_are_numbered_in_the_order_in_which_they_are_kept() -> None:
    """After those that an earlier sampler kept."""
    table = GroupTable()
    earlier = group_of((Outcome.CORRECT, 1, False, 3))
    earlier.kept_order = 7
    table.restore_kept("earlier", earlier)
    for name in ("first", "second"):
        table.add(name, group_of((Outcome.CORRECT, 1, False, 3)))
        table.keep(name)
    assert {name: group.kept_order for name, group in table.kept.items()} == {"earlier": 7, "first": 8, "second": 9}
