"""Owns the faults of the platform, in streams, learner, rollout and chart; `make test` must catch each of them.

Must not apply them; run.py does, in a copy. Faults in formulas are in learner.py and sampling.py.
"""

from __future__ import annotations

from tests.mutations.table import Mutation

PLATFORM = [
    Mutation(
        "streams: a learner that was replaced commits",
        "services/streams/connection/functions.py",
        "if signature.is_fenced:",
        'if signature.is_fenced and signature.function != "commit_step":',
        ("tests/services/streams/test_library.py", "tests/services/streams/test_history.py"),
    ),
    Mutation(
        "streams: trimmed up to the newest lease, not the oldest",
        "services/streams/lua/delivery/trim.lua",
        "first = pending[2]",
        "first = pending[3]",
        ("tests/services/streams/test_trim.py",),
    ),
    Mutation(
        "streams: a consumer without a lease still publishes",
        "services/streams/lua/groups/publish_samples.lua",
        "pending and is_leased(tasks_key, consumer_group, task_entry)",
        "pending",
        ("tests/services/streams/test_streams.py", "tests/services/streams/test_history.py"),
    ),
    Mutation(
        "learner: the average over ranks is not undone",
        "learner/training/trainer.py",
        "found.loss * self._ranks.world",
        "found.loss",
        ("tests/conformance/test_gradient_invariance.py",),
    ),
    Mutation(
        "learner: a recovery leaves out the last committed step",
        "learner/recovery/start.py",
        "committed + 1))",
        "committed))",
        ("tests/learner/test_recovery.py",),
    ),
    Mutation(
        "learner: a batch is retrained that another learner archived",
        "learner/recovery/start.py",
        "if groups != record.groups:",
        "if not groups:",
        ("tests/learner/test_recovery.py",),
    ),
    Mutation(
        "learner: one that was replaced deletes what its successor of the same epoch wrote",
        "services/contracts/ownership.py",
        "writer.epoch < self.epoch",
        "writer.epoch <= self.epoch",
        ("tests/learner/test_archive.py", "tests/learner/test_woken.py"),
    ),
    Mutation(
        "learner: a joining replica gets no weights",
        "learner/weight_sync/publisher.py",
        'frozenset({"joining", "ready"})',
        'frozenset({"ready"})',
        ("tests/learner/test_weights.py",),
    ),
    Mutation(
        "rollout: caches outlive the weights",
        "rollout/engine.py",
        'pause_generation(mode="keep", clear_cache=True)',
        'pause_generation(mode="keep", clear_cache=False)',
        ("tests/rollout/test_weight_sync.py",),
    ),
    Mutation(
        "rollout: all spans carry the first version",
        "rollout/engine.py",
        "VersionSpan(version=int(stamp.version)",
        "VersionSpan(version=int(stamps[0].version)",
        ("tests/rollout/test_weight_sync.py",),
    ),
    Mutation(
        "chart: the API's Service selects the pods of another component",
        "helm/penstock/templates/api/api-service.yaml",
        '{{- include "penstock.selectorLabels" $self | nindent 4 }}',
        '{{- include "penstock.selectorLabels" (dict "root" . "component" "head") | nindent 4 }}',
        ("tests/helm/test_selectors.py",),
    ),
    Mutation(
        "chart: Redis is opened to everything but the learner",
        "helm/penstock/templates/network/networkpolicy.yaml",
        '(list "api" "head" "cpu" "verifier" "rollout" "learner")',
        '(list "api" "head" "cpu" "verifier" "rollout")',
        ("tests/helm/test_network.py",),
    ),
]
