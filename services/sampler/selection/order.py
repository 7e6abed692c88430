"""Owns the order in which kept groups are trained.

Must not decide which are too old; staleness is pacing's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple


class Waiting(NamedTuple):
    """A kept group: the oldest policy version that wrote a token of it, and the how-manieth it was to be kept."""

    name: str
    oldest_version: int
    kept_order: int


CONSUMPTION: Mapping[str, Callable[[Waiting], tuple[int, ...]]] = {
    "oldest_first": lambda one: (one.oldest_version, one.kept_order),
    "newest_first": lambda one: (-one.oldest_version, -one.kept_order),
    "fifo": lambda one: (one.kept_order,),
}
"""By setting: what kept groups are sorted by, the first to be trained first.

`oldest_first` loses the fewest groups to the staleness bound; `newest_first` trains the least off-policy, and lets the
rest grow stale; `fifo` is the order in which groups were kept, whatever versions wrote them.
"""


def in_order(consumption: str, waiting: Iterable[Waiting]) -> list[str]:
    """The names of the kept groups, the next to be trained first."""
    return [one.name for one in sorted(waiting, key=CONSUMPTION[consumption])]
