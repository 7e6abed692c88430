"""Owns one test over many cases: it checks every case and reports all failures by name, not only the first.

Must not be used for cases with separate fixtures or long cases: those need pytest's parametrize.
"""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import pytest

TIMED_OUT = "Timeout "
"""The start of a pytest-timeout failure, which ends the whole test, because later cases would have no limit."""


def each(
    names: str, cases: Iterable[Any] | Callable[[], Iterable[Any]], called: Callable[[Any], object] = str
) -> Callable[[Any], Any]:
    """Like pytest.mark.parametrize, but as one test: collecting thousands of cases takes longer than checking them.

    `names`: the parameters, separated by commas; with several, a case is a tuple. `cases`: the cases, or a function
    that makes them when the test runs. `called` returns a case's name.
    """
    parameters = [name.strip() for name in names.split(",")]
    given = cases if callable(cases) else list(cases)

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        if inspect.iscoroutinefunction(test):
            raise TypeError(
                f"{test.__name__} is not valid: expected a plain function, because coroutines would not be awaited"
            )

        @functools.wraps(test)
        def over_all(**fixtures: Any) -> None:
            listed = list(given()) if callable(given) else given
            assert listed, "there are no cases"
            failures = [(called(case), _failure(test, parameters, case, fixtures)) for case in listed]
            failed = [(name, text) for name, text in failures if text]
            if failed:
                summary = f"{len(failed)} of {len(listed)} fail: {'; '.join(str(name) for name, _ in failed)}"
                pytest.fail("\n\n".join([summary, *(f"{name}:\n{text}" for name, text in failed)]), pytrace=False)

        signature = inspect.signature(test)
        kept = [parameter for name, parameter in signature.parameters.items() if name not in parameters]
        over_all.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        return over_all

    return decorate


def _failure(test: Callable[..., None], parameters: list[str], case: Any, fixtures: dict[str, Any]) -> str:
    """The failure of a case with its traceback; empty if it passes."""
    values = (case,) if len(parameters) == 1 else case
    try:
        test(**dict(zip(parameters, values, strict=True)), **fixtures)
    except (
        Exception,
        pytest.fail.Exception,
        pytest.skip.Exception,
    ) as error:  # a skipped case must not skip the others
        if str(error).startswith(TIMED_OUT):
            raise
        inside = error.__traceback__.tb_next if error.__traceback__ else None
        return "".join(traceback.format_exception(type(error), error, inside)).rstrip()
    return ""
