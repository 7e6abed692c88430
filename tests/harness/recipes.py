"""Owns the small valid recipe that tests submit.

Must not start anything.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any


def recipe_document(folder: Path | str, /, **sections: dict[str, Any]) -> dict[str, Any]:
    """A small valid recipe; `sections` are merged into it."""
    document: dict[str, Any] = {
        "name": "tiny",
        "model": {"path": str(folder), "max_model_len": 256},
        "data": {
            "task": "chain_sum", "train": 32, "held_out": 8,
            "options": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
        },
        "algorithm": {"group_size": 4},
        "rollout": {"max_new_tokens": 16, "max_sequences": 32, "kv_cache_mib": 64},
        "learner": {"mini_batch_groups": 2, "learning_rate": 1e-3, "warmup_rollout_steps": 0},
        "limits": {"rollout_steps": 3, "groups_per_step": 4, "lease_s": 5.0, "max_inflight_groups": 32},
        "evaluation": {"samples": 2},
    }  # fmt: skip
    for name, values in sections.items():
        document[name] = {**document.get(name, {}), **values} if isinstance(values, dict) else values
    return document
