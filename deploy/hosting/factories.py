"""Owns the factory of each service; a factory imports its service only in the process that hosts it.

Must not import a service at module level: the gateway would load every engine.
"""

from __future__ import annotations

from services.process.hosting import Service


def sampler() -> Service:
    """The dynamic-sampling queue."""
    from services.sampler.service import SamplerService

    return SamplerService()


def tracker() -> Service:
    """The copy of a run's log to the trackers that its recipe names."""
    from services.tracking.service import TrackerService

    return TrackerService()


def verifier() -> Service:
    """One verifier replica."""
    from verifier.service import VerifierService

    return VerifierService()


def rollout() -> Service:
    """One vLLM replica."""
    from rollout.service import RolloutService

    return RolloutService()


def learner(rank: int, world: int, master_host: str, master_port: int) -> Service:
    """One DeepSpeed rank; rank 0 listens on `master_host:master_port` for the others."""
    from learner.service import LearnerService

    return LearnerService(rank, world, master_host, master_port)
