"""Two runs at once, one of which loses every learner until it fails: the other one's control path is untouched."""

import pytest

from benchmarks.api.two_runs import DOOMED, HEALTHY, PAUSED, RESUMED, document, measure

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray"), pytest.mark.timeout(2400)]

PHASES, ROUTES = ("before", "failing", "after"), ("view", "events", "waits", "pause", "resume", PAUSED, RESUMED)


def test_a_failing_run_leaves_the_other_alone(stack, tiny_model, questions):
    findings, killer = measure(stack, document(tiny_model, questions, steps=40), seconds=10.0)
    print("\n".join(findings.table()))
    failed, healthy = stack.view(DOOMED), stack.view(HEALTHY)
    assert failed["state"] == killer.state == "failed"
    assert "restarted 10 times without a new rollout step" in failed["reason"]
    assert len(killer.killed) > 10
    assert tuple(findings.seconds) == PHASES
    assert all(findings.seconds["failing"][name] for name in ROUTES), "the healthy run was asked meanwhile"
    assert findings.late == [], "a wait of the healthy run exceeded its deadline"
    assert findings.foreign == []
    assert healthy["groups"]["reconciled"]
    assert {process["run"] for process in healthy["processes"]} <= {HEALTHY}
    assert [change["state"] for change in healthy["history"]][-1] == "succeeded"
