"""Owns what a combined reward makes of the findings of its parts.

Must not judge a text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import fsum

from services.contracts import Outcome, SandboxFault
from services.settings.rewards.reward import Reward, RewardPart
from verifier.sandbox.finding import Finding

PART_CHARACTERS = 120
"""How much of a part's reason the combined reason quotes."""

Parts = Sequence[tuple[RewardPart, Finding]]


def _every(parts: Parts) -> tuple[Outcome, float]:
    """Correct iff all parts are; a wrong part decides even if another is unknown. The score is the lowest."""
    known = [finding for _, finding in parts if finding.outcome is not Outcome.UNKNOWN]
    if any(finding.outcome is Outcome.WRONG for finding in known):
        return Outcome.WRONG, min(finding.score for finding in known)
    if len(known) < len(parts):
        return Outcome.UNKNOWN, 0.0
    return Outcome.CORRECT, min(finding.score for finding in known)


def _some(parts: Parts) -> tuple[Outcome, float]:
    """Correct iff one part is, even if another is unknown. The score is the highest."""
    known = [finding for _, finding in parts if finding.outcome is not Outcome.UNKNOWN]
    if any(finding.outcome is Outcome.CORRECT for finding in known):
        return Outcome.CORRECT, max(finding.score for finding in known)
    if len(known) < len(parts):
        return Outcome.UNKNOWN, 0.0
    return Outcome.WRONG, max(finding.score for finding in known)


def _weighted(parts: Parts) -> tuple[Outcome, float]:
    """Correct iff the first part is. The score is the weighted mean of all; one unknown part makes it unknown."""
    if any(finding.outcome is Outcome.UNKNOWN for _, finding in parts):
        return Outcome.UNKNOWN, 0.0
    weights = fsum(part.weight for part, _ in parts)
    mean = fsum(part.weight * finding.score for part, finding in parts) / weights
    return parts[0][1].outcome, min(1.0, max(0.0, mean))


RULES: dict[str, Callable[[Parts], tuple[Outcome, float]]] = {"all": _every, "any": _some, "weighted": _weighted}
"""By kind of a combination: its outcome and score."""


def combined(reward: Reward, findings: Sequence[Finding]) -> Finding:
    """The finding of a reward from those of its single rewards, in the order of `reward.singles`."""
    return _combined(reward, list(findings))


def _combined(reward: Reward, left: list[Finding]) -> Finding:
    if not reward.parts:
        return left.pop(0)
    parts = [(part, _combined(part.reward, left)) for part in reward.parts]
    outcome, score = RULES[reward.kind](parts)
    known = {part.name: found.score for part, found in parts if found.outcome is not Outcome.UNKNOWN}
    faults = [found.fault for _, found in parts if found.fault]
    answers = [found.answer for _, found in parts if found.answer]
    return Finding(
        outcome,
        score,
        reason="; ".join(f"{part.name} {_quoted(found)}" for part, found in parts),
        answer=answers[0] if answers and outcome is not Outcome.UNKNOWN else "",
        fault=(faults[0] if faults else SandboxFault.ERROR) if outcome is Outcome.UNKNOWN else None,
        rewards=known,
    )


def _quoted(finding: Finding) -> str:
    text = finding.reason if len(finding.reason) <= PART_CHARACTERS else f"{finding.reason[:PART_CHARACTERS]}..."
    return f"{finding.outcome.value} ({finding.score:g}): {text}"
