"""Owns the order in which kept groups are trained.

Must not decide which groups are too stale; `queue.publication` does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

CONSUMPTION: Mapping[str, Callable[[int, int], tuple[int, ...]]] = {
    "oldest_first": lambda oldest_version, kept_order: (oldest_version, kept_order),
    "newest_first": lambda oldest_version, kept_order: (-oldest_version, -kept_order),
    "fifo": lambda oldest_version, kept_order: (kept_order,),
}
"""By setting: the sort key of a kept group, from its oldest version and its ordinal among all kept groups, from 1.

The first group is trained first. `oldest_first` loses the fewest groups to the staleness limit. `newest_first` trains
the least off-policy, while the other groups grow stale. `fifo` is the order in which groups were kept, whatever their
versions.
"""
