"""Owns how tests load one source as the sampler loads each of its sources.

Must not repeat what the sampler does in one call.
"""

from __future__ import annotations

from services.contracts import Prompt
from services.sampler.data import RowRewards
from services.sampler.data.gathering import Gathered, gather, remove_bad_references, where_of
from services.settings import SourceSettings


def read_set(source: SourceSettings, rewards: RowRewards | None = None) -> tuple[Prompt, ...]:
    """The prompts of a source without a trial of its references by their verifiers."""
    found = gather(source, where_of(source), None, rewards or RowRewards())
    found.remove({})
    found.settle()
    return found.prompts


def gathered(source: SourceSettings, wanted: int | None = None, rewards: RowRewards | None = None) -> Gathered:
    """The first `wanted` distinct questions of a source (None: all), its references tried."""
    found = gather(source, where_of(source), wanted, rewards or RowRewards())
    remove_bad_references([found])
    found.settle()
    found.limit(wanted)
    return found


def load_set(
    source: SourceSettings, wanted: int | None = None, rewards: RowRewards | None = None
) -> tuple[Prompt, ...]:
    """The prompts of `gathered`."""
    return gathered(source, wanted, rewards).prompts
