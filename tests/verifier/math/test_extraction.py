"""Where the answer is: the last box, else the last answer line, else, on request, the last number."""

import time

import pytest

from verifier.verifiers.math.extraction import SEARCHED, extract
from verifier.verifiers.math.verdict import judge


@pytest.mark.parametrize(
    ("response", "source", "text"),
    [
        (r"Answer: 4 but \boxed{5} is better", "box", "5"),
        (r"\boxed{\frac{1}{2}} and more text", "box", r"\frac{1}{2}"),
        (r"\boxed{ \{1, 2\} }", "box", r"\{1, 2\}"),
        (r"\boxed {5}", "box", "5"),
        (r"\fbox{5}", "box", "5"),
        (r"\boxed 5.", "box", "5"),
        (r"write \boxed{} at the end. \boxed{7}", "box", "7"),
        (r"use \boxed{\text{your answer}}. \boxed{7}", "box", "7"),
        ("Answer: 4\nAnswer: 5", "answer line", "5"),
        ("**Final Answer:** 5", "answer line", "5"),
        ("The correct answer is (C).", "answer line", "(C)"),
        ("the answer to the question is 7", "answer line", "7"),
        ("ANSWER: 7", "answer line", "7"),
        ("#### 7", "answer line", "7"),
        ("### Final Answer\n7", "answer line", "7"),
        ("so\nA: 7", "answer line", "7"),
        ("Answer:\n\n7\nmore", "answer line", "7"),
        ("Answer: St. Ives. It is far.", "answer line", "St. Ives"),
        ("Answer: 3.5. It is e.g. long.", "answer line", "3.5"),
        ("Answer: e.g. 5", "answer line", "e.g. 5"),
        ("Answer: 5\nQuote: Answer: <your result>", "answer line", "5"),
        ("The answer is:\n\\[\nx = 5\n\\]\nDone.", "answer line", "\\[\nx = 5\n\\]"),
    ],
)
def test_the_answer_is_found(response, source, text):
    found = extract(response, last_number=False)
    assert found is not None
    assert (found.source, found.text) == (source, text)
    assert not found.fault


@pytest.mark.parametrize(
    "response", ["", " \n", "it is 5", "A: 5\nmore text", "Answer: <your result>", "answers vary", "x = 5"]
)
def test_without_a_mark_there_is_no_answer(response):
    assert extract(response, last_number=False) is None
    found = judge(response, {"answer": "5"}, {})
    assert (found.correct, found.answer) == (False, "")
    assert "no answer found" in found.reason


@pytest.mark.parametrize(
    ("response", "fault"),
    [
        (r"\boxed{\frac{1}{2}", "truncated"),
        (r"Answer: 5 and \boxed{5", "truncated"),
        (r"\boxed{5} then \boxed{", "truncated"),
        (r"\boxed{5} then \boxed{}", "empty"),
        ("Answer:", "nothing follows"),
        ("Answer: 5. No, wait, it is 6.", "hedged"),
    ],
)
def test_a_faulty_answer_is_wrong_and_nothing_replaces_it(response, fault):
    found = judge(response, {"answer": "5"}, {"last_number": True})
    assert not found.correct
    assert fault in found.reason


@pytest.mark.parametrize(
    ("response", "number"),
    [
        ("so it is 1,234.50 in all", "1,234.50"),
        ("it costs $5 today", "$5"),
        ("3/4 of it", "3/4"),
        ("it grew by 12%", "12%"),
        ("it is -5.", "-5"),
        ("first 4, then 5.", "5"),
    ],
)
def test_the_last_number_counts_only_on_request(response, number):
    assert extract(response, last_number=False) is None
    found = extract(response, last_number=True)
    assert found is not None
    assert (found.source, found.text) == ("last number", number)


def test_boxes_outside_the_searched_end_are_not_seen():
    early, late = r"\boxed{6}", r"\boxed{5}"
    assert not judge(early + "x" * (SEARCHED - 100) + late, {"answer": "5"}, {}).correct
    assert judge(early + "x" * SEARCHED + late, {"answer": "5"}, {}).correct


@pytest.mark.parametrize("order", [("5", "6"), ("6", "5")])
def test_different_boxes_are_wrong_in_any_order(order):
    found = judge(" so ".join(rf"\boxed{{{value}}}" for value in order), {"answer": "5"}, {})
    assert not found.correct


@pytest.mark.parametrize(
    "response",
    [
        "\\boxed{" * 50_000,
        "\\boxed{1}" * 50_000,
        "Answer: x\n" * 50_000,
        "answer to " + "a " * 50_000,
        "#### \n" * 50_000,
    ],
    ids=["open boxes", "boxes", "marks", "long mark", "hashes"],
)
def test_extraction_takes_linear_time(response):
    started = time.process_time()
    extract(response, last_number=True)
    assert time.process_time() - started < 1.0
