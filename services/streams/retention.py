"""Owns how many entries of each kind Redis keeps of a run.

Must not delete anything; the functions in lua/ do, with these numbers.
"""

from __future__ import annotations

WEIGHT_MESSAGES_KEPT = 1000
"""Weight plans, and as many acks; only the newest are read."""
EVENTS_KEPT = 10_000
"""Events of a run; older ones are in the processes' logs."""
RELEASED_KEPT = 512
"""Hashes of released groups, so that late results still find them."""
DEAD_KEPT = 1024
"""Dead letters."""
REDRIVEN_PENDING = 32
"""Redriven groups that may be pending at once: the sampler reserves no slot for them in advance."""
REDRIVEN_KEPT = DEAD_KEPT
"""Names of redriven groups. Above this number, names that no dead letter can refer to any more are deleted: at most
2 x DEAD_KEPT stay, and those of pending groups."""
