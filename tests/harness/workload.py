"""Owns the chaos suite's workload: a tiny model, questions that it answers correctly half of the time, and the recipes.

Must not be used outside tests.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tests.harness.tiny_model import write_tiny_model

QUESTIONS = 60
LEASE_S = 4.0


def write_questions(path: Path) -> Path:
    """Prompts whose answer must contain one of a few letters; a random model is correct about half of the time."""
    chosen = random.Random(3)
    rows = []
    for number in range(QUESTIONS):
        letters = "".join(chosen.sample("abcdefghijklmnopqrstuvwxyz", 6))
        reference = {"pattern": f"[{letters}]"}
        rows.append({"question": f"{number}: use one of {letters}", "verifier": "pattern", "reference": reference})
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def write_model(folder: Path) -> Path:
    """A policy of 0.3 million parameters; an existing model is kept."""
    return folder if (folder / "config.json").exists() else write_tiny_model(folder, scale=0.2)


def recipe(model: Path, questions: Path, *, steps: int, replicas: int, ranks: int, staleness: int) -> dict[str, Any]:
    """A run with short leases and a checkpoint every few steps."""
    return {
        "name": "chaos",
        "model": {"path": str(model), "max_model_len": 256},
        "data": {"source": "jsonl", "path": str(questions), "train": 44, "held_out": 8, "options": {}},
        "algorithm": {"group_size": 4, "overlong": {"cache": 8}},
        "verifier": {"replicas": 2},
        "rollout": {
            "max_new_tokens": 48,
            "max_sequences": 16,
            "kv_cache_mib": 64,
            "cpus": 0.2,
            "replicas": replicas,
        },
        "learner": {
            "mini_batch_groups": 2,
            "learning_rate": 1e-6,
            "warmup_rollout_steps": 0,
            "cpus": 0.2,
            "ranks": ranks,
            "checkpoint_every": 4,
            "checkpoints_kept": 2,
        },
        "weights": {"timeout_s": 20.0},
        "limits": {
            "rollout_steps": steps,
            "groups_per_step": 4,
            "lease_s": LEASE_S,
            "max_inflight_groups": 32,
            "max_staleness": staleness,
            "startup_timeout_s": 300.0,
            "stall_timeout_s": 300.0,
        },
        "evaluation": {"samples": 2, "every": 20},
    }
