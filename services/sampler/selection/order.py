"""Owns the order in which kept groups are trained: which ones the next batch takes, and their order within the batch.

Must not decide which groups are too stale; `queue.publication` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from random import Random

CONSUMPTION: Mapping[str, Callable[[int, int], tuple[int, ...]]] = {
    "oldest_first": lambda oldest_version, kept_order: (oldest_version, kept_order),
    "newest_first": lambda oldest_version, kept_order: (-oldest_version, -kept_order),
    "fifo": lambda oldest_version, kept_order: (kept_order,),
}
"""By setting: the sort key of a kept group, from its oldest version and its ordinal among all kept groups, from 1.

The next batch takes the first groups. `oldest_first` loses the fewest groups to the staleness limit. `newest_first`
trains the least off-policy, while the other groups grow stale. `fifo` is the order in which groups were kept, whatever
their versions.
"""


def shuffled(groups: Iterable[str], seed: int, step: int) -> list[str]:
    """The `groups` of the batch of rollout step `step` in the order in which they are cut into mini-batches.

    The order depends on the names, the run's seed and the step alone. Groups of short responses are complete first: in
    the order of completion, the first optimizer steps would train easy prompts and the last ones hard prompts.
    """
    names = sorted(groups)
    Random(f"{seed} {step}").shuffle(names)
    return names
