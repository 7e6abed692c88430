"""Owns how much of each kind Redis keeps of a run.

Must not remove anything; the functions in lua/ do, with these numbers.
"""

from __future__ import annotations

WEIGHT_MESSAGES_KEPT = 1000
"""Weight plans, and as many acks, that Redis keeps; only the newest are read."""
EVENTS_KEPT = 10_000
"""Events of a run that Redis keeps; older ones are in the processes' logs."""
RELEASED_KEPT = 512
"""Tombstones of released groups, so that late results still meet them."""
DEAD_KEPT = 1024
"""Dead letters."""
REDRIVEN_PENDING = 32
"""Redriven groups that may be pending at once: the sampler has no slot for one before it hears of it."""
REDRIVEN_KEPT = DEAD_KEPT
"""Names of redriven groups. Above this number, the names that no letter can refer to any more are forgotten: at most
2 x DEAD_KEPT stay, and those of pending groups."""
