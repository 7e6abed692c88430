"""The worked examples in the docstrings of learner/algorithm give the results that they state."""

from __future__ import annotations

import doctest
import pkgutil
from importlib import import_module

import pytest

import learner.algorithm

MODULES = [module.name for module in pkgutil.iter_modules(learner.algorithm.__path__)]


@pytest.mark.conformance(formula="worked examples in the code's documentation", setting="algorithm.*")
@pytest.mark.parametrize("name", MODULES)
def test_a_worked_example_gives_its_stated_result(name: str) -> None:
    report: list[str] = []
    module = import_module(f"learner.algorithm.{name}")
    runner = doctest.DocTestRunner()
    for example in doctest.DocTestFinder().find(module):
        runner.run(example, out=report.append)
    assert runner.failures == 0, "".join(report)
    assert runner.tries > 0, f"learner/algorithm/{name}.py has no worked example"
