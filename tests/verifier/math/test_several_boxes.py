"""One value of a list per box is one answer; different boxes for a single value are none."""

import pytest

from tests.harness.each import each
from verifier.verifiers.math.verdict import check_reference, judge

ACCEPTED = [
    (r"\boxed{1} and \boxed{2}", "1, 2"),
    (r"\boxed{2}, \boxed{1}", r"\{1, 2\}"),
    (r"so \boxed{-2} \quad \text{and} \quad \boxed{1}", "n = 1, n = -2"),
    (r"\boxed{(2, 2)} and \boxed{(6, 2)}", "(2, 2), (6, 2)"),
    (r"\boxed{k = 45} and \boxed{n = 2}", "k = 45, n = 2"),
    (r"\boxed{1,2}", r"\boxed{1} papers and \boxed{2} bins"),
    (r"first \boxed{\frac12}, finally \boxed{0.5}", "0.5"),
]
REJECTED = [
    (r"\boxed{5} or rather \boxed{6}", "6"),
    (r"\boxed{5} or rather \boxed{6}", "5"),
    (r"\boxed{1}, \boxed{2}, \boxed{3}", "1, 2"),
    (r"\boxed{1}", "1, 2"),
    (r"\boxed{(2, 2)} and \boxed{(2, 6)}", "(2, 2), (6, 2)"),
    (r"\boxed{1} and \boxed{2", "1, 2"),
    (r"\boxed{1} then \boxed{1, 2}", "1, 2"),
]


@each("text, answer", ACCEPTED)
def test_boxes_with_all_values_are_correct(text, answer):
    found = judge(text, {"answer": answer})
    assert found.correct, found.reason


@each("text, answer", REJECTED)
def test_boxes_that_differ_are_wrong(text, answer):
    found = judge(text, {"answer": answer})
    assert not found.correct, found.reason


def test_a_reference_with_an_open_box_is_refused():
    with pytest.raises(ValueError, match=r"reference answer: .* is not valid"):
        check_reference({"answer": r"\boxed{1} and \boxed{2"})
