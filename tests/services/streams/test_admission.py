"""Which messages a stream admits, by size, type and run; and the dead letters of all others."""

import json

import pytest

from services.contracts import Batch, Cause, DeadLetter, Message, Sample, StepRecord, Task, Verdict, WeightPlan
from services.streams.delivery import validation
from services.streams.delivery.validation import LARGEST_LETTER, LARGEST_MESSAGE, Malformed, Source, admit, origin
from services.streams.keys import RunKeys
from tests.services.driven import batch_of, record_of, sample_of, task_of, verdict_on

KEYS = RunKeys("r")
SAMPLE = sample_of(KEYS, "g0", 1)
BATCH = batch_of(KEYS, 1, ["g0", "g1"])


def raw(message):
    return message.model_dump_json().encode()


def changed(message, *path, to):
    """The message with another value at `path`; `to` may be of any type."""
    document = place = json.loads(message.model_dump_json())
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = to
    return json.dumps(document).encode()


@pytest.mark.parametrize(
    "message",
    [
        task_of("g0", stop=1),
        SAMPLE,
        verdict_on(SAMPLE),
        BATCH,
        record_of(BATCH, 3),
        WeightPlan(generation=1, version=0, host="h", port=1, world=1, members={"a": 1}, timeout_s=1.0),
    ],
    ids=lambda message: message.kind,
)
def test_the_run_s_own_messages_are_admitted(message):
    assert admit(KEYS, type(message), raw(message)) == message


@pytest.mark.parametrize(
    ("model", "body", "reason"),
    [
        (Task, b"", "not a valid Task: message: Invalid JSON"),
        (Task, b"\xff\xfe", "not a valid Task: message: Invalid JSON"),
        (Task, b"[]", "not a valid Task: message: Input should be an object"),
        (Task, b"null", "not a valid Task: message: Input should be an object"),
        (Task, raw(task_of("g0"))[:-5], "not a valid Task: message: Invalid JSON: EOF"),
        (Task, raw(SAMPLE), "not a valid Task: kind: Input should be 'task'"),
        (Task, changed(task_of("g0"), "schema_version", to=2), "not a valid Task: schema_version: Input should be 1"),
        (Task, changed(task_of("g0"), "samples", to=4097), "samples: Input should be less than or equal to 4096"),
        (
            Task,
            changed(task_of("g0"), "sampling", "temperature", to=float("nan")),
            "sampling.temperature: Input should be",
        ),
        (
            Task,
            changed(task_of("g0"), "prompt", "messages", 0, "role", to=[]),
            "prompt.messages.0.role: Input should be a",
        ),
        (Sample, changed(SAMPLE, "index", to=-1), "index: Input should be greater than or equal to 0"),
        (Sample, changed(SAMPLE, "index", to=10**30), "index: "),
        (Sample, changed(SAMPLE, "facts", "mean_logprob", to=float("inf")), "mean_logprob: Input should be a finite"),
        (Sample, b"[" * 100_000, "not a valid Sample: message: Invalid JSON: recursion limit"),
        (Sample, changed(SAMPLE, "reference", to={"x" * 9999: []}) + b"}", "not a valid Sample: message: Invalid JSON"),
        (Verdict, changed(verdict_on(SAMPLE), "score", to=1.5), "score: Input should be less than or equal to 1"),
        (Verdict, changed(verdict_on(SAMPLE), "score", to=float("nan")), "score: "),
    ],
)
def test_an_invalid_message_is_rejected_with_its_field(model, body, reason):
    malformed = admit(KEYS, model, body)
    assert isinstance(malformed, Malformed)
    assert reason in malformed.reason
    assert len(malformed.reason) < 700


@pytest.mark.parametrize(
    ("model", "body", "reason"),
    [
        (Sample, raw(sample_of(RunKeys("another"), "g0", 1)), "facts.payload: 'penstock:{another}:payload:g0:1'"),
        (Sample, changed(SAMPLE, "index", to=0), "facts.payload: 'penstock:{r}:payload:g0:1' is not valid: expected "),
        (Sample, changed(SAMPLE, "group", to="g7"), "expected 'penstock:{r}:payload:g7:1'"),
        (
            Verdict,
            raw(verdict_on(sample_of(RunKeys("another"), "g0", 1))),
            "facts.payload: 'penstock:{another}:payload",
        ),
        (Batch, raw(batch_of(RunKeys("another"), 1, ["g0"])), "expected one of group 'g0' of this run"),
        (Batch, changed(BATCH, "groups", 1, "samples", 0, "payload", to="penstock:{r}:payload:g0:0"), "group 'g1'"),
        (Batch, changed(BATCH, "groups", to=[]), "groups: [] is not valid: expected at least one"),
    ],
)
def test_a_message_of_another_run_is_rejected(model, body, reason):
    malformed = admit(KEYS, model, body)
    assert isinstance(malformed, Malformed)
    assert malformed.reason.startswith(f"not a {model.__name__} of this run: ")
    assert reason in malformed.reason


def test_a_message_that_is_too_large_is_not_read(monkeypatch):
    body = b" " * (LARGEST_MESSAGE - len(raw(SAMPLE))) + raw(SAMPLE)
    assert admit(KEYS, Sample, body) == SAMPLE
    monkeypatch.setattr(Sample, "model_validate_json", None)
    malformed = admit(KEYS, Sample, body + b" ")
    assert malformed == Malformed(f"{LARGEST_MESSAGE + 1} bytes; a Sample has at most {LARGEST_MESSAGE}")


def test_a_letter_keeps_the_message_up_to_a_limit():
    malformed = Malformed("no good", "g0", "p0")
    whole = malformed.letter(Source("stream", "1-0", b'{"a": 1}', 3))
    assert (whole.reason, whole.cause, whole.group, whole.prompt) == ("no good", Cause.INVALID, "g0", "p0")
    assert (whole.stream, whole.entry, whole.deliveries, whole.body) == ("stream", "1-0", 3, '{"a": 1}')
    long = malformed.letter(Source("stream", "1-0", b"x" * (LARGEST_LETTER + 1)))
    assert (len(long.body), long.size) == (LARGEST_LETTER, LARGEST_LETTER + 1)
    binary = malformed.letter(Source("stream", "1-0", b"\xff\x00"))
    assert DeadLetter.model_validate_json(binary.model_dump_json()) == binary


def test_a_rejected_message_names_its_origin_if_readable():
    assert origin(task_of("g0")) == ("g0", "p0")
    assert origin(SAMPLE) == ("g0", None)
    assert origin(BATCH) == (None, None)
    rejected = admit(KEYS, Sample, changed(SAMPLE, "index", to=0))
    assert (rejected.group, rejected.prompt) == ("g0", None)
    assert admit(KEYS, Sample, changed(SAMPLE, "index", to="x")).group is None


def test_every_message_with_payloads_is_checked_for_its_run():
    def names_payloads(model):
        return "payload" in json.dumps(model.model_json_schema())

    assert set(validation.CHECKS) == {model for model in Message.__subclasses__() if names_payloads(model)}
    assert StepRecord not in validation.CHECKS
