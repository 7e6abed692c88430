"""Owns the reading of records: those of HumanEval, MBPP, LiveCodeBench, APPS and TACO, and two plain forms.

Must not unpickle or run anything of a record.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Mapping
from typing import Any

from verifier.programs.records.asserts import human_eval_tests, mbpp_tests
from verifier.programs.records.tasks import CallTest, OutputTest, ProgramTask, ProgramTest

Reference = Mapping[str, Any]
MOST_TESTS = 2000
USUAL_IMPORTS = """
import bisect, collections, copy, functools, heapq, itertools, math, operator, random, re, statistics, string, sys
from bisect import bisect_left, bisect_right, insort
from collections import Counter, OrderedDict, defaultdict, deque
from functools import cache, cmp_to_key, lru_cache, reduce
from heapq import heapify, heappop, heappush, heapreplace, nlargest, nsmallest
from itertools import accumulate, chain, combinations, count, groupby, pairwise, permutations, product
from math import ceil, comb, factorial, floor, gcd, inf, isqrt, lcm, log2, sqrt
from typing import *
"""
"""What starter code of LiveCodeBench, APPS and TACO uses without importing it (its annotations, above all)."""


def task_of(reference: Reference) -> ProgramTask:
    """The task of a record. Raises ValueError, which names the field, its value and what is accepted."""
    for fields, read in READERS.items():
        if all(name in reference for name in fields):
            task = read(reference)
            break
    else:
        forms = "; ".join(" and ".join(fields) for fields in READERS)
        raise ValueError(f"reference: fields {sorted(reference)!r} is not valid: expected {forms}"[:600])
    if not 0 < task.count <= MOST_TESTS:
        raise ValueError(f"reference: {task.count} tests is not valid: expected 1 to {MOST_TESTS}")
    return task


def _invalid(field: str, value: object, expected: str) -> ValueError:
    return ValueError(f"{field}: {value!r:.100} is not valid: expected {expected}")


def _text(reference: Reference, field: str, default: str | None = None) -> str:
    value = reference.get(field, default)
    if not isinstance(value, str):
        raise _invalid(field, value, "a text")
    return value


def _texts(reference: Reference, field: str) -> list[str]:
    value = reference.get(field) or []
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise _invalid(field, value, "a list of texts")
    return value


def _parsed(field: str, source: str) -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _invalid(field, source, f"Python ({error})") from None


def _human_eval(reference: Reference) -> ProgramTask:
    prompt, name = _text(reference, "prompt"), _text(reference, "entry_point")
    if not name.isidentifier():
        raise _invalid("entry_point", name, "the name of a function")
    described = ProgramTask((), prompt=prompt, entry_point=name)
    test = _parsed("test", _text(reference, "test"))
    tests = human_eval_tests(test, name, described.trusted_helpers())
    if not tests:
        raise _invalid("test", reference["test"], "a function check(candidate) with asserts")
    return ProgramTask(tests, prompt=prompt, entry_point=name)


def _mbpp(reference: Reference) -> ProgramTask:
    asserts = _texts(reference, "test_list") + _texts(reference, "challenge_test_list")
    imports = reference.get("test_imports") or []
    before = imports if isinstance(imports, str) else "\n".join(_texts(reference, "test_imports"))
    setup = reference.get("test_setup_code") or ""
    code = reference.get("code") or reference.get("canonical_solution") or ""
    return _asserted(asserts, "test_list", before, str(setup), str(code))


def _plain_asserts(reference: Reference) -> ProgramTask:
    return _asserted(_texts(reference, "asserts"), "asserts", "", "", "")


def _asserted(asserts: list[str], field: str, before: str, setup: str, code: str) -> ProgramTask:
    known = {node.name for node in _parsed("code", code).body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    parsed = [_parsed(field, each) for each in asserts]
    return ProgramTask(
        mbpp_tests(parsed, _parsed("test_setup_code", setup), _parsed("test_imports", before), known), before
    )


def _live_code_bench(reference: Reference) -> ProgramTask:
    cases = []
    for field in ("public_test_cases", "private_test_cases"):
        cases += _listed(reference.get(field), field)
    metadata = _json(reference.get("metadata") or {}, "metadata")
    name = metadata.get("func_name") if isinstance(metadata, dict) else None
    tests: list[ProgramTest] = []
    for case in cases:
        kind = case.get("testtype", "stdin")
        if kind == "stdin":
            tests.append(OutputTest(_text(case, "input"), _text(case, "output")))
        elif kind == "functional":
            arguments = [_json(line, "input") for line in _text(case, "input").split("\n") if line.strip()]
            tests.append(CallTest(_function(name), arguments, (_json(_text(case, "output"), "output"),)))
        else:
            raise _invalid("testtype", kind, "stdin or functional")
    return ProgramTask(tuple(tests), USUAL_IMPORTS)


def _function(name: object) -> str:
    if not isinstance(name, str) or not name.isidentifier():
        raise _invalid("metadata.func_name", name, "the name of the function that functional tests call")
    return name


def _listed(value: object, field: str) -> list[Reference]:
    found = _json(value, field) if value else []
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise _invalid(field, found, "a list of {input, output, testtype}, or its JSON text")
    return found


def _json(value: object, field: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        pass
    packed = (
        "JSON. The published private tests are base64 of zlib of a pickle, which can run code and is never read here: "
        "convert them once, where you trust them: pickle.loads(zlib.decompress(b64decode(text))) is the JSON text"
    )
    raise _invalid(field, value, packed if field == "private_test_cases" else "JSON")


def _input_output(reference: Reference) -> ProgramTask:
    cases = _json(reference["input_output"], "input_output")
    if not isinstance(cases, dict):
        raise _invalid("input_output", cases, "{inputs, outputs[, fn_name]}, or its JSON text")
    inputs, outputs = cases.get("inputs"), cases.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise _invalid("input_output", cases, "lists `inputs` and `outputs` of one length")
    name = cases.get("fn_name")
    if name:
        tests = [_call(_function(name), given, expected) for given, expected in zip(inputs, outputs, strict=True)]
        return ProgramTask(tuple(tests), USUAL_IMPORTS)
    pairs = zip(inputs, outputs, strict=True)
    return ProgramTask(tuple(OutputTest(_lines(given), _lines(expected)) for given, expected in pairs), USUAL_IMPORTS)


def _call(name: str, given: object, expected: object) -> CallTest:
    arguments = given if isinstance(given, list) else [given]
    # These data sets wrap most results into a list of one, but not all.
    unwrapped = (expected[0],) if isinstance(expected, list) and len(expected) == 1 else ()
    return CallTest(name, arguments, (*unwrapped, expected))


def _lines(value: object) -> str:
    if isinstance(value, list):
        return "\n".join(map(str, value)) + "\n"
    if not isinstance(value, str):
        raise _invalid("input_output", value, "texts, or lists of lines")
    return value


def _plain_tests(reference: Reference) -> ProgramTask:
    cases = _listed(reference["tests"], "tests")
    return ProgramTask(tuple(OutputTest(_text(case, "stdin", ""), _text(case, "stdout")) for case in cases))


READERS: dict[tuple[str, ...], Callable[[Reference], ProgramTask]] = {
    ("prompt", "test", "entry_point"): _human_eval,
    ("test_list",): _mbpp,
    ("private_test_cases",): _live_code_bench,
    ("public_test_cases",): _live_code_bench,
    ("input_output",): _input_output,
    ("tests",): _plain_tests,
    ("asserts",): _plain_asserts,
}
"""By the fields that a record has, first match: how it is read."""
