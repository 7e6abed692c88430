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
UNARCHIVED_KEPT = 256
"""Groups that wait for the archive without their payloads."""
DEAD_KEPT = 1024
"""Dead letters."""
UNKNOWN_KEPT = 50
"""Unknown verdicts with their reasons."""
DELETIONS_KEPT = 1000
"""Ids of deleted runs."""
