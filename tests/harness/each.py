"""Owns one test over many cases: every case is checked, and all that fail are told by name, not the first alone.

Must not be used where the cases need fixtures of their own, or take long: then pytest's parametrize is right.
"""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import pytest

TIMED_OUT = "Timeout "
"""How the failure begins that pytest-timeout raises inside a test; whatever comes after would have no limit."""


def each(
    names: str, cases: Iterable[Any] | Callable[[], Iterable[Any]], called: Callable[[Any], object] = str
) -> Callable[[Any], Any]:
    """Like pytest.mark.parametrize, but as one test: thousands of collected cases cost more than what they check.

    `names` are the parameters, by commas; of several, a case is a tuple. `cases` are given, or made by a function when
    the test runs. `called` gives a case's name.
    """
    parameters = [name.strip() for name in names.split(",")]
    given = cases if callable(cases) else list(cases)

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        if inspect.iscoroutinefunction(test):
            raise TypeError(f"{test.__name__} is a coroutine function, which nothing would await")

        @functools.wraps(test)
        def over_all(**fixtures: Any) -> None:
            listed = list(given()) if callable(given) else given
            assert listed, "there are no cases"
            complaints = [(called(case), _complaint(test, parameters, case, fixtures)) for case in listed]
            failed = [(name, told) for name, told in complaints if told]
            if failed:
                summary = f"{len(failed)} of {len(listed)} fail: {'; '.join(str(name) for name, _ in failed)}"
                pytest.fail("\n\n".join([summary, *(f"{name}:\n{told}" for name, told in failed)]), pytrace=False)

        signature = inspect.signature(test)
        kept = [parameter for name, parameter in signature.parameters.items() if name not in parameters]
        over_all.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        return over_all

    return decorate


def _complaint(test: Callable[..., None], parameters: list[str], case: Any, fixtures: dict[str, Any]) -> str:
    """What is wrong with a case, with where; empty where nothing is."""
    values = (case,) if len(parameters) == 1 else case
    try:
        test(**dict(zip(parameters, values, strict=True)), **fixtures)
    except (Exception, pytest.fail.Exception, pytest.skip.Exception) as error:  # a case may not skip the others
        if str(error).startswith(TIMED_OUT):
            raise
        inside = error.__traceback__.tb_next if error.__traceback__ else None
        return "".join(traceback.format_exception(type(error), error, inside)).rstrip()
    return ""
