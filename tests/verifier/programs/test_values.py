"""Values leave a jail as plain data, and are compared outside of it."""

import ast
import json
from collections import Counter, OrderedDict, defaultdict, namedtuple
from contextlib import suppress
from decimal import Decimal
from enum import IntEnum
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verifier.programs.inside.encoding import DEPTH, Foreign, NotPlainError, decode, dumps, encode, loads
from verifier.programs.records.comparing import NotEvaluatedError, evaluate, same_output, same_value, shown

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False)
)
HASHABLE = st.recursive(SCALARS, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=6)
PLAIN = st.recursive(
    HASHABLE,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(HASHABLE, inner, max_size=4) | st.sets(HASHABLE, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=40, deadline=None)
@given(PLAIN)
def test_plain_data_survives(value):
    found = decode(loads(dumps(encode(value))))
    assert found == value
    assert type(found) is type(value)


Point = namedtuple("Point", "x y")
Color = IntEnum("Color", "RED")


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (Counter("aab"), {"a": 2, "b": 1}),
        (OrderedDict(a=1), {"a": 1}),
        (defaultdict(int, a=1), {"a": 1}),
        (Point(1, 2), (1, 2)),
        (Color.RED, 1),
        ({1: 2}.keys(), {1}),
        ({1: 2}.items(), {(1, 2)}),
        (Fraction(1, 2), 0.5),
        (Decimal("2.5"), 2.5),
        pytest.param(10**5000, 10**5000, id="huge"),
        pytest.param(-(10**5000), -(10**5000), id="huge and negative"),
        (range(3), range(3)),
        (bytearray(b"x"), b"x"),
        (float("inf"), float("inf")),
        ("\ud800", "\ud800"),
    ],
)
def test_other_types_are_written_as_what_they_equal(value, plain):
    assert decode(loads(dumps(encode(value)))) == plain


def test_an_object_of_another_class_equals_nothing():
    found = decode(loads(dumps(encode(object()))))
    assert isinstance(found, Foreign)
    assert found != object()


def test_a_value_that_contains_itself_is_not_plain():
    value = []
    value.append(value)
    with pytest.raises(NotPlainError, match="nested"):
        encode(value)


NOT_PLAIN = (
    *("{", "[", "nul", "[" * 100_000, '{"a": 1}', '["unknown", 1]', "[]", '["s", ["l"]]', '["d", [1]]', '["b", "xy"]'),
    *('["i", "0xg"]', '["r", 1, 0]', '["h", 3]', '["d", [["l"], 1]]', "1" * 10_000, '["c", 1]', '["g", "a"]', "\x00"),
    "[" * (DEPTH + 1) + '"l"' + "]" * (DEPTH + 1),
)


@pytest.mark.parametrize("text", NOT_PLAIN)
def test_what_is_not_plain_is_rejected(text):
    with pytest.raises(NotPlainError):
        decode(loads(text))


@settings(max_examples=40, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=3),
        lambda i: st.lists(i) | st.dictionaries(st.text(), i),
    )
)
def test_any_json_is_decoded_or_rejected(written):
    with suppress(NotPlainError):
        decode(loads(json.dumps(written)))


@pytest.mark.parametrize(
    ("expected", "found", "same"),
    [
        ("1 2\n", "1 2", True),
        ("1 2\n", "1 2 \n\n\n", True),
        ("1\n2\n", "1 2\n", False),
        ("a  b", "a b", True),
        ("0.5", "0.50000001", True),
        ("0.5", "0.51", False),
        ("1", "1.0", False),
        ("1.0", "1", True),
        ("1.0", "nan", False),
        ("1000.0", "1_000.0", False),
        ("x.y", "x.z", False),
        ("", "", True),
        ("", "x", False),
        ("\n1", "1", False),
        ("Yes", "yes", False),
    ],
)
def test_outputs_are_compared_by_line_and_token(expected, found, same):
    assert same_output(expected, found) is same


@pytest.mark.parametrize(
    ("expected", "found", "same"),
    [
        ([1, [2]], (1, (2,)), True),
        (0.1 + 0.2, 0.3, True),
        ([1.0], [1], True),
        (1, True, True),
        (1.5, True, False),
        pytest.param(1.5, 10**400, False, id="huge"),
        ({"a": 1.0}, {"a": 1.0000001}, True),
        ({"a": 1}, {"b": 1}, False),
        ("1", 1, False),
        (None, None, True),
        ([1], None, False),
    ],
)
def test_values_are_compared_as_json(expected, found, same):
    assert same_value(expected, found) is same


@pytest.mark.parametrize(
    "source",
    [
        "9 ** 9 ** 9",
        "'a' * 10 ** 9",
        "1 << 10 ** 9",
        "open('x')",
        "().__class__",
        "[x for x in (1,)]",
        "f()",
        "value.x",
        "lambda: 1",
    ],
)
def test_an_unbounded_or_unknown_operation_is_not_evaluated(source):
    with pytest.raises((NotEvaluatedError, TypeError)):
        evaluate(ast.parse(source, mode="eval").body, {"value": 1})


def test_a_shown_value_is_short_and_ascii():
    assert len(shown("\x1b[31m" * 1000)) == 60
    assert shown("é\n") == "'\\xe9\\n'"
    assert shown(10**5000) == "a huge number"
