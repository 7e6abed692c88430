"""Owns the measurement of what requests of a vLLM replica see of a publication.

Must not report.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from benchmarks.weights.policies import Policy, config_of
from benchmarks.weights.transfer import Measurement, fleet
from services.settings import WeightsSettings
from services.streams.connection.client import connect
from tests.harness.tiny_model import tokenizer

REQUESTS = 8


@dataclass(frozen=True)
class Interruption:
    """A publication amid requests. publish_s, staging_s and pause_s as the product reports them, in seconds.

    The other fields are those of benchmarks.weights.engine_replica.Seen.
    """

    publish_s: float
    staging_s: float
    pause_s: float
    asked: int
    lost: int
    versions: int
    longest_gap_s: float
    usual_gap_s: float


def write_model(folder: Path, name: str) -> None:
    """A model with random weights, which never stops by itself."""
    config = config_of(name)
    config.eos_token_id = None
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)


async def measure(
    redis_url: str, folder: Path, name: str, settings: WeightsSettings, repeats: int, tokens: int
) -> list[Interruption]:
    """Publish while REQUESTS requests of `tokens` tokens each run, `repeats` times."""
    redis = await connect(redis_url)
    await asyncio.to_thread(write_model, folder, name)
    sections = {
        "model": {"max_model_len": 64 + tokens},
        "rollout": {"max_new_tokens": tokens, "max_sequences": REQUESTS, "kv_cache_mib": 512},
        "weights": settings.model_dump(),
    }
    policy = Policy(name)
    try:
        async with Measurement.open(redis, "pause", policy, settings, folder, **sections) as learner:
            with fleet("pause", redis_url, 1, "benchmarks.weights.engine_replica") as [replica]:
                await learner.await_replicas(1)
                await learner.publish(0)
                found = []
                for version in range(1, repeats + 1):
                    replica.tell("start", requests=REQUESTS, tokens=tokens)
                    await asyncio.to_thread(replica.answer)
                    seconds = await learner.publish(version)
                    replica.tell("finish")
                    seen = await asyncio.to_thread(replica.answer)
                    publish_s, staging_s, pause_s = (seconds[f"{part}_s"] for part in ("publish", "staging", "apply"))
                    found.append(Interruption(publish_s=publish_s, staging_s=staging_s, pause_s=pause_s, **seen))
                return found
    finally:
        await redis.aclose()
