"""Messages on the wire: each kind reads the golden file of an older release, and writes the same text again."""

import json
from pathlib import Path

import pytest

from services.contracts import (
    Batch,
    DeadLetter,
    EvaluationRecord,
    Event,
    Message,
    RowFunctions,
    Sample,
    SamplerSnapshot,
    StepRecord,
    Task,
    UnknownVerdict,
    Verdict,
    WeightAck,
    WeightPlan,
)

GOLDEN = Path(__file__).parent / "golden"
OLDER = sorted((GOLDEN / "older").iterdir())
KINDS = {
    kind.model_fields["kind"].default: kind
    for kind in (
        Batch,
        DeadLetter,
        EvaluationRecord,
        Event,
        RowFunctions,
        Sample,
        SamplerSnapshot,
        StepRecord,
        Task,
        UnknownVerdict,
        Verdict,
        WeightAck,
        WeightPlan,
    )
}


def test_every_kind_has_a_golden_file():
    assert set(KINDS.values()) == set(Message.__subclasses__())
    assert {path.stem for path in GOLDEN.glob("*.json")} == set(KINDS)


@pytest.mark.parametrize("name", KINDS)
def test_golden_file_is_read_and_written(name):
    kind, text = KINDS[name], (GOLDEN / f"{name}.json").read_text()
    assert kind.model_validate_json(text).model_dump_json(indent=2) + "\n" == text
    newer = '{"from_a_newer_release": 1, ' + text.lstrip()[1:]
    assert kind.model_validate_json(newer) == kind.model_validate_json(text), "unknown fields are ignored"


@pytest.mark.parametrize("name", KINDS)
def test_a_golden_file_has_no_field_at_its_default(name):
    """If a field had its default value, the test would not notice its loss."""
    kind, message = KINDS[name], json.loads((GOLDEN / f"{name}.json").read_text())
    defaults = {
        field
        for field, about in kind.model_fields.items()
        if field not in ("kind", "schema_version")
        and not about.is_required()
        and message[field] == json.loads(json.dumps(about.get_default(call_default_factory=True)))
    }
    assert defaults == set()


@pytest.mark.parametrize("path", OLDER, ids=lambda path: path.stem)
def test_what_an_older_release_wrote_is_still_read(path):
    """`older/KIND-N.json` is the N-th earlier golden file of a kind."""
    kind = KINDS[path.stem.rsplit("-", 1)[0]]
    written = json.loads(path.read_text())
    read = kind.model_validate_json(path.read_text()).model_dump(mode="json")
    assert differences(written, read) == []
    assert differences(read, written) != [], "this release must write more, or the file is not from an older one"


ABSENT = object()


def differences(part, whole, at=""):
    """The paths in `part` that are missing or have another value in `whole`."""
    if isinstance(part, dict) and isinstance(whole, dict):
        return [
            path for key, value in part.items() for path in differences(value, whole.get(key, ABSENT), f"{at}.{key}")
        ]
    if isinstance(part, list) and isinstance(whole, list) and len(part) == len(whole):
        return [path for pair in zip(part, whole, strict=True) for path in differences(*pair, f"{at}[]")]
    return [] if part == whole else [at]
