"""Messages on the wire: each kind reads the golden file that an older release may have written, and writes it again."""

from pathlib import Path

import pytest

from services.contracts import (
    Batch,
    DeadLetter,
    EvaluationRecord,
    Event,
    Message,
    Sample,
    StepRecord,
    Task,
    Verdict,
    WeightAck,
    WeightPlan,
)  # fmt: skip

GOLDEN = Path(__file__).parent / "golden"
KINDS = [Batch, DeadLetter, EvaluationRecord, Event, Sample, StepRecord, Task, Verdict, WeightAck, WeightPlan]


def test_every_kind_has_a_golden_file():
    assert set(KINDS) == set(Message.__subclasses__())
    assert {path.stem for path in GOLDEN.iterdir()} == {kind.model_fields["kind"].default for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_golden_file_is_read_and_written(kind):
    text = (GOLDEN / f"{kind.model_fields['kind'].default}.json").read_text()
    assert kind.model_validate_json(text).model_dump_json(indent=2) + "\n" == text
    newer = '{"from_a_newer_release": 1, ' + text.lstrip()[1:]
    assert kind.model_validate_json(newer) == kind.model_validate_json(text), "unknown fields are ignored"
