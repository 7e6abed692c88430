"""Owns the mutations: one deliberate fault per formula, each of which the conformance suite must catch.

Must not apply them; run.py does, in a copy.
"""

from __future__ import annotations

from typing import NamedTuple

from tests.mutations.learner import LEARNER
from tests.mutations.sampling import SAMPLING


class Mutation(NamedTuple):
    """`old`, which occurs once in `file`, becomes `new`: a plausible fault, and the code still runs.

    `tests`: the files, one of which must catch it; if empty, the conformance suite must.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...] = ()


MUTATIONS = [
    Mutation(name, file, old, new) for file, faults in (LEARNER | SAMPLING).items() for name, old, new in faults
]
