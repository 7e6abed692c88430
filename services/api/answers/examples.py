"""Owns the examples of the OpenAPI document: one of each body and response, by the name of its model.

Must not have values that a real run could not have; the tests check each against its schema.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.settings import parse_recipe

RECIPE: dict[str, Any] = {
    "name": "math",
    "model": {"path": "Qwen/Qwen2.5-0.5B@main", "max_model_len": 4096},
    "data": {"task": "chain_sum", "train": 4096, "held_out": 256},
    "limits": {"rollout_steps": 200, "groups_per_step": 32},
}
AT, ENTRY, RUN = 1767225600.0, "1767225600000-0", "math-20260101-000000-5f0c"
SUMMARY: dict[str, Any] = {
    "id": RUN,
    "project": "default",
    "state": "running",
    "reason": "all services are ready",
    "created_at": AT,
    "rollout_replicas": 2,
    "closing": None,
    "cancel_requested": False,
    "priority": 0,
    "problem": None,
}
EVENT = {
    "kind": "event",
    "schema_version": 1,
    "service": "learner",
    "phase": "checkpoint",
    "text": "checkpoint of step 10",
    "at": AT,
}
SAMPLE: dict[str, Any] = {
    "index": 3,
    "outcome": "correct",
    "score": 1.0,
    "reason": "",
    "answer": "6",
    "rewards": {},
    "reward": 1.0,
    "advantage": 0.5,
    "masked": False,
    "staleness": 0,
    "prompt_tokens": 46,
    "response_tokens": 2,
    "truncated": False,
    "mean_logprob": -0.4,
    "oldest_version": 9,
    "newest_version": 9,
    "started_at": AT,
    "finished_at": AT,
    "replica": "rollout-7d1b58cf",
    "finish_reason": "stop",
    "text": "1 + 5 = 6",
    "spans": [{"version": 9, "start": 0, "end": 2}],
}
TRANSITION = {"state": "running", "at": AT, "reason": "all services are ready"}
EVALUATION = {
    "kind": "evaluation",
    "schema_version": 1,
    "name": "before",
    "set": "held-out",
    "version": 0,
    "newest_version": 0,
    "prompts": 256,
    "samples_per_prompt": 4,
    "temperature": 1.0,
    "top_p": 1.0,
    "accuracy": 0.41,
    "standard_error": 0.02,
    "pass_at": [{"k": 1, "value": 0.41, "standard_error": 0.02}, {"k": 4, "value": 0.63, "standard_error": 0.02}],
    "majority": 0.47,
    "majority_standard_error": 0.03,
    "score": 0.41,
    "score_standard_error": 0.02,
    "rewards": {"math": 0.41},
    "response_length": 512.5,
    "response_tokens": 524800,
    "truncated_share": 0.04,
    "unknown": 0,
    "dropped": 0,
    "at": AT,
}
STEP = {
    "kind": "step",
    "schema_version": 1,
    "step": 10,
    "version": 10,
    "optimizer_steps": 2,
    "groups": ["t.12", "t.15"],
    "metrics": {"accuracy": 0.44, "reward": 0.44, "entropy": 0.31},
    "optimizer": [],
    "generation_started_at": AT - 60,
    "generation_finished_at": AT - 20,
    "learning_started_at": AT - 20,
    "learning_finished_at": AT,
    "prompts": ["gsm8k-7", "gsm8k-90"],
    "staleness": [0, 1],
    "weights": "",
    "batch_digest": "",
    "epoch": 1,
    "owner": "learner-5f0c1d2e",
    "id": ENTRY,
}
WAIT: dict[str, Any] = {
    "name": "batch",
    "waits_for": "the batch of rollout step 11",
    "since": AT,
    "deadline_s": 3600.0,
    "idle": False,
}
PROCESS = {
    "id": "learner-5f0c1d2e",
    "service": "learner",
    "run": RUN,
    "host": "10.0.0.7",
    "pid": 4711,
    "metrics": "10.0.0.7:9100",
    "state": "ready",
    "version": 10,
    "workers": 1,
    "started_at": AT,
    "waits": [WAIT],
    "library": "penstock_5f0c1d2e3b4a",
    "idle_s": 12.5,
}
COUNTS = {
    "dispatched": 320,
    "trained": 256,
    "filtered": 32,
    "stale": 0,
    "dead": 0,
    "pending": 32,
    "reconciled": True,
}
UNKNOWN = {
    "entry": ENTRY,
    "at": AT,
    "lane": "train",
    "prompt": "gsm8k-7",
    "group": "t.12",
    "index": 3,
    "reason": "rewards.py:14: ZeroDivisionError: division by zero",
    "excerpt": "... so the answer is 42",
}
VIEW: dict[str, Any] = {
    **SUMMARY,
    "recipe": parse_recipe(RECIPE).model_dump(mode="json"),
    "history": [TRANSITION],
    "policy_version": 10,
    "rollout_steps": 10,
    "rollout_steps_total": 200,
    "groups": COUNTS,
    "processes": [PROCESS],
    "events": [EVENT],
    "alerts": [],
    "unknown_verdicts": [UNKNOWN],
    "evaluations": [EVALUATION],
    "export_path": None,
    "summary": None,
    "pause_requested": False,
    "resumptions": 0,
    "resume_step": None,
    "files": {},
    "revision": 7,
    "edits": [],
    "waits_for": None,
    "queue_position": None,
}
SPENT: dict[str, Any] = {
    "closes": True,
    "currency": "USD",
    "tokens": {
        "generated": 4000,
        "trained": 3000,
        "filtered": 500,
        "stale": 0,
        "dead": 0,
        "evaluated": 500,
        "discarded": 0,
        "in_flight": 0,
    },
    "gpu_seconds": 100.0,
    "cpu_seconds": 400.0,
    "cost": 0.0738,
    "rows": [
        {
            "use": use,
            "tokens": n,
            "share": n / 5000,
            "gpu_seconds": n / 50,
            "cpu_seconds": n / 12.5,
            "cost": n * 14.76e-6,
        }
        for use, n in (("trained", 3000), ("filtered", 500), ("evaluated", 500))
    ]
    + [{"use": "idle", "tokens": 0, "share": 0.2, "gpu_seconds": 20.0, "cpu_seconds": 80.0, "cost": 0.01476}],
}
STORY = {"id": f"{ENTRY}_{ENTRY}_0-0_3", "kind": "event", "at": AT, "data": EVENT}
FILE = {
    "name": "rank-0000.safetensors",
    "size": 988097824,
    "sha256": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
}
REQUESTS: Mapping[str, dict[str, Any]] = {
    "SubmitRequest": {"recipe": RECIPE, "id": RUN},
    "ScaleRequest": {"rollout": 4, "verifier": 2},
    "ResumeRequest": {"from_step": 10},
    "EditRequest": {"learner.learning_rate": 5e-7},
    "CloneRequest": {"overrides": {"learner.learning_rate": 1e-5}},
    "AdoptRequest": {"id": RUN},
    "CheckRequest": {"recipe": RECIPE},
}
RESPONSES: Mapping[str, dict[str, Any]] = {
    "RunSummary": SUMMARY,
    "RunView": VIEW,
    "AcceptedRun": {**VIEW, "state": "queued", "reason": "submitted", "warnings": []},
    "RunList": {"runs": [SUMMARY], "next": None},
    "ClosedList": {"runs": [SUMMARY], "refused": [], "more": False, "dry_run": True},
    "QueueView": {
        "runs": [
            {
                "id": RUN,
                "project": "default",
                "position": 1,
                "priority": 0,
                "since": AT,
                "waits_for": "8 GPUs: 4 are free",
            }
        ],
        "length": 1,
    },
    "MetricsView": {"steps": [STEP]},
    "WaitView": {**WAIT, "process": "learner-5f0c1d2e", "service": "learner", "seconds": 12.5, "stalled": False},
    "DeadView": {
        "entry": ENTRY,
        "at": AT,
        "stream": "tasks",
        "cause": "too-long",
        "reason": "the prompt has 5000 tokens: expected at most 4096",
        "deliveries": 1,
        "group": "t.12",
        "prompt": "gsm8k-7",
        "size": 2048,
        "excerpt": "{}",
    },
    "UnknownView": UNKNOWN,
    "EventPage": {"events": [STORY], "next": STORY["id"], "more": False, "ended": False},
    "CheckpointList": {
        "checkpoints": [
            {"name": "step-000010.e0001-learner-5f0c1d2e.3f9a2c1b", "step": 10, "version": 10, "files": [FILE]}
        ]
    },
    "FileList": {"place": "s3://models/runs/math/export", "files": [{**FILE, "name": "model.safetensors"}]},
    "LogList": {
        "processes": [
            {
                "process": "learner-5f0c1d2e",
                "service": "learner",
                "host": "10.0.0.7",
                "started_at": AT,
                "last_at": AT,
                "lines": 120,
                "dropped": 0,
                "live": True,
            }
        ]
    },
    "LogPage": {
        "lines": [{"at": AT, "level": "INFO", "text": "learner.coordinator: step 10 is trained", "id": ENTRY}],
        "next": ENTRY,
        "more": False,
    },
    "SampleList": {
        "samples": [
            {
                **SAMPLE,
                "group": "g00000003",
                "lane": "train",
                "resumption": 0,
                "release": "trained",
                "evaluation": "",
                "set": "",
                "step": 10,
                "version": 10,
                "archived_ms": 1767225600000,
                "prompt_id": "p000004",
                "versions": [9],
            }
        ],
        "next": None,
        "problems": [],
    },
    "GroupView": {
        "group": "g00000003",
        "lane": "train",
        "release": "trained",
        "prompt": {
            "id": "p000004",
            "messages": [{"role": "user", "content": "1 + 5 ="}],
            "verifier": "math",
            "reference": {"answer": "6"},
            "metadata": {},
        },
        "attempts": [
            {
                "resumption": 0,
                "release": "trained",
                "reason": "3 of 4 samples are correct",
                "step": 10,
                "version": 10,
                "staleness": 0,
                "optimizer_step": 1,
                "optimizer": {"loss": 0.021, "gradient_norm": 0.31, "applied": True},
                "optimizer_steps": 2,
                "learning_rate": 1e-6,
                "checkpoint": "step-000010",
                "samples": [{**SAMPLE, "tokens": [{"id": 28, "text": "6", "logprob": -0.1, "version": 9}]}],
            }
        ],
        "problem": None,
    },
    "ComparisonView": {
        "runs": ["math-a", "math-b"],
        "settings": [{"path": "learner.learning_rate", "values": {"math-a": 1e-6, "math-b": 2e-6}}],
        "steps": [1, 2],
        "curves": {"accuracy": {"math-a": [0.41, 0.43], "math-b": [0.41, None]}},
        "thinned": False,
    },
    "RunLedger": {
        **SPENT,
        "run": RUN,
        "project": "default",
        "prices": {"gpu_hour": 2.5, "cpu_hour": 0.04},
        "budget": 25.0,
        "gpu_hours_limit": None,
        "since": AT,
    },
    "PlatformLedger": {"currency": "USD", "projects": [{**SPENT, "project": "default", "runs": 3}]},
    "Health": {"status": "ok"},
    "TargetGroup": {"targets": ["10.0.0.7:9100"], "labels": {"service": "learner", "run": RUN}},
    "RecipeCheck": {"faults": ["learner.ranks: 0 is not valid: expected a number greater than 0"]},
    "Examples": {"examples": [{"name": "math", "recipe": RECIPE}]},
    "AuditPage": {
        "entries": [
            {
                "at": AT,
                "request": "5f0c1d2e3b4a5968",
                "principal": "alice",
                "address": "10.0.0.9",
                "method": "PATCH",
                "path": f"/v1/runs/{RUN}/scale",
                "route": "scale_run",
                "run": RUN,
                "project": "default",
                "outcome": "done",
                "status": 202,
                "changes": {"rollout": 4},
            }
        ],
        "next": None,
    },
    "WhoView": {"name": "alice", "roles": {"default": "operator"}, "expires_at": None},
    "ProjectList": {
        "projects": [
            {
                "name": "default",
                "role": "operator",
                "quota": {"gpus": 8, "runs": 4, "redis_memory": 2**30},
                "use": {"gpus": 4.0, "runs": 1, "redis_memory": 2**28},
            }
        ]
    },
}
