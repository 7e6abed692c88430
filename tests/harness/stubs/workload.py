"""Owns the workload of stub stacks: questions that the stub engine answers, and a recipe of any scale.

Must not be used outside tests and benchmarks, or import the code under test.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PATTERN = "^right"
HELD_OUT = 4


def write_questions(path: Path, count: int) -> Path:
    """So many questions; a response that starts with `right` answers each."""
    rows = (
        {"question": f"question {number}", "verifier": "pattern", "reference": {"pattern": PATTERN}}
        for number in range(count)
    )
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def recipe(questions: Path, train: int, **limits: Any) -> dict[str, Any]:
    """A run over the first `train` questions. `limits` are those of the recipe.

    Also accepted: algorithm (more of that section), group_size, rollout, verifiers, checkpoint_every, every
    (evaluations), max_sequences.
    """
    group_size, replicas = limits.pop("group_size", 16), limits.pop("rollout", 1)
    groups = limits["groups_per_step"]
    return {
        "name": "stub",
        "model": {"path": "/none", "max_model_len": 256},
        "data": {"source": "jsonl", "path": str(questions), "train": train, "held_out": HELD_OUT, "options": {}},
        "algorithm": {"group_size": group_size, **limits.pop("algorithm", {})},
        "verifier": {"replicas": limits.pop("verifiers", 1)},
        "rollout": {
            "max_new_tokens": 64,
            "max_sequences": limits.pop("max_sequences", 64),
            "kv_cache_mib": 64,
            "replicas": replicas,
        },
        "learner": {
            "ranks": 1,
            "mini_batch_groups": groups,
            "warmup_rollout_steps": 0,
            "checkpoint_every": limits.pop("checkpoint_every", 10),
            "checkpoints_kept": 2,
        },
        "evaluation": {"samples": 1, "every": limits.pop("every", 0)},
        "limits": {"max_staleness": 1, "lease_s": 30.0, **limits},
    }
