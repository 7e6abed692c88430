"""Owns the order in which kept groups are trained.

Must not decide which groups are too stale; `queue.publication` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple


class Waiting(NamedTuple):
    """A kept group. `kept_order`: its ordinal among all kept groups, from 1."""

    name: str
    oldest_version: int
    kept_order: int


CONSUMPTION: Mapping[str, Callable[[Waiting], tuple[int, ...]]] = {
    "oldest_first": lambda group: (group.oldest_version, group.kept_order),
    "newest_first": lambda group: (-group.oldest_version, -group.kept_order),
    "fifo": lambda group: (group.kept_order,),
}
"""By setting: the sort key of kept groups. The first group is trained first.

`oldest_first` loses the fewest groups to the staleness limit. `newest_first` trains the least off-policy, while the
other groups grow stale. `fifo` is the order in which groups were kept, whatever their versions.
"""


def in_order(consumption: str, waiting: Iterable[Waiting]) -> list[str]:
    """The ids of the kept groups, in the order in which they are trained."""
    return [group.name for group in sorted(waiting, key=CONSUMPTION[consumption])]
