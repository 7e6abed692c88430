"""Retries have a bound, a log line, and no effect on errors that do not pass."""

import asyncio
import logging
import threading

import pytest

from services.retry import Retry


class PassingError(Exception):
    """An error that waiting cures."""


class Failing:
    """Fails as often as it is told, then succeeds."""

    def __init__(self, *errors):
        self.errors, self.calls = list(errors), 0

    def __call__(self):
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return self.calls

    async def later(self):
        return self()


def retry(**bounds):
    return Retry(lambda error: isinstance(error, PassingError), 0.0, **bounds)


@pytest.fixture(params=["run", "run_async"])
def outcome(request):
    """Runs an operation under a retry, in both forms."""

    def run(retrying, failing):
        if request.param == "run":
            return retrying.run(failing)
        return asyncio.run(retrying.run_async(failing.later))

    return run


def test_an_error_that_passes_is_retried_and_logged(outcome, caplog):
    seen = []
    with caplog.at_level(logging.WARNING, "services.retry"):
        assert outcome(retry(on_failure=seen.append), Failing(PassingError("one"), PassingError("two"))) == 3
    assert caplog.messages == ["one; retry in 0 s", "two; retry in 0 s"]
    assert [str(error) for error in seen] == ["one", "two"]


def test_the_log_line_says_what_is_retried(caplog):
    with caplog.at_level(logging.WARNING, "services.retry"):
        retry(about="run r").run(Failing(PassingError("no answer")))
    assert caplog.messages == ["run r: no answer; retry in 0 s"]


def test_any_other_error_is_raised_at_once(outcome):
    failing = Failing(ValueError("wrong"))
    with pytest.raises(ValueError, match="wrong"):
        outcome(retry(), failing)
    assert failing.calls == 1


@pytest.mark.parametrize(("bounds", "calls"), [({"attempts": 3}, 3), ({"for_s": 0.0}, 1)])
def test_a_bound_ends_the_retries_with_the_last_error(outcome, bounds, calls):
    failing = Failing(*(PassingError(str(number)) for number in range(1, 9)))
    with pytest.raises(PassingError, match=str(calls)):
        outcome(retry(**bounds), failing)
    assert failing.calls == calls


def test_a_set_event_ends_the_retries():
    stop = threading.Event()
    stop.set()
    failing = Failing(PassingError("one"), PassingError("two"))
    with pytest.raises(PassingError, match="one"):
        retry().run(failing, stop.wait)
