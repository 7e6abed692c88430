"""The published rule of DAPO's scorer: which line is read, its normal form, and the time of hostile text."""

import time

import pytest

from verifier.verifiers.answer_line import answer_line, normalised
from verifier.verifiers.reasoning_gym import extract_answer
from verifier.verifiers.registry import judge

RULE = pytest.mark.conformance(
    formula="the last `Answer:` line, equal as a normalised string (code)", setting="verifier = answer-line"
)


def correct(text, answer):
    return judge("answer-line", text, {"answer": answer}).correct


@RULE
@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("So it is.\nAnswer: 42", "42"),
        ("Answer: 1\nNo, wait.\nAnswer: 2\n", "2"),  # the last line wins
        ("answer : 7", "7"),
        ("The final ANSWER:7", "7"),
        ("Answer:\n\n 7 \nDone.", "7"),  # the colon may end its line
        ("Answer: 7\nAnswer:", "7"),  # the last line is empty
        ("Answer: x = 3, y = 4", "x = 3, y = 4"),
        ("The answer is 42", ""),
        ("", ""),
        ("Answer: 5" + "." * 292, "5" + "." * 292),  # 301 characters: the mark has lost its first letter below
    ],
)
def test_the_last_answer_line_is_read(text, line):
    if len(text) > 300:
        assert answer_line(text) == ""
        text = text[:-1]
        line = line[:-1]
    assert answer_line(text) == line


@RULE
@pytest.mark.parametrize(
    ("written", "normal"),
    [
        ("42", "42"),
        ("x = 42", "42"),
        ("a = b = 42", "42"),
        ("1,234,567", "1234567"),
        ("1{,}234", "1234"),
        ("(1,2)", "(1,2)"),
        ("$42$", "42"),
        ("it is $42$ exactly", "42"),
        ("\\$42", "42"),
        ("42 dollars", "42"),
        ("42^\\circ", "42"),
        ("42 \\text{ cm}", "42"),
        ("\\boxed{42}", "42"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\frac12", "\\frac{1}{2}"),
        ("\\frac123", "\\frac{1}{2}3"),
        ("\\sqrt2", "\\sqrt{2}"),
        ("\\sqrt{2}", "\\sqrt{2}"),
        ("\\textbf{B}", "B"),
        ("\\mbox{even}", "even"),
        ("x,\\text{and}y", "x,y"),
        ("an apple", "apple"),
        ("\\overline{AB}", "AB"),
        ("\\text{open", "\\text{open"),
        ("3\\!", "3\\!"),
        ("12,\\!345", "12345"),
        ("units", ""),
    ],
)
def test_normal_form(written, normal):
    assert normalised(written) == normal


@RULE
def test_equality_is_of_strings():
    assert correct("Answer: 1,000", "1000")
    assert correct("Answer: $\\frac12$", "\\frac{1}{2}")
    assert not correct("Answer: 0.5", "\\frac{1}{2}"), "equal in value, but in another notation"
    assert not correct("Answer: 42.", "42"), "the published rule compares the full stop too"
    assert not correct("42", "42"), "the response has no answer line"
    assert correct("Answer: 7", 7)


def test_the_judged_answer_is_the_compared_string():
    judgement = judge("answer-line", "Answer: \\boxed{1,000} dollars", {"answer": "5"})
    assert (judgement.correct, judgement.score, judgement.answer) == (False, 0.0, "1000")
    assert judge("answer-line", "no idea", {"answer": "5"}).answer == ""


def test_an_unusable_reference_is_an_error():
    with pytest.raises(ValueError, match="'units' is not valid"):
        judge("answer-line", "Answer: 5", {"answer": "units"})
    with pytest.raises(ValueError, match="expected 'answer'"):
        judge("answer-line", "Answer: 5", {})


def test_reasoning_gym_reads_the_answer_line_of_format_dapo():
    assert extract_answer("Left, then right.\nAnswer: up", oracle="up") == "up"
    assert extract_answer("up", oracle="up") == "up"
    assert extract_answer("Answer: 3 or 4", oracle="4") == "4", "the last number must be taken"


MEGABYTE = 1 << 20
PIECES = [
    *("$", "\\text{", "\\text{}", "\\boxed{", "{", "}", "Answer:", "answer", " ", "\n", "Answer: \n", "frac", "sqrt"),
    *("=", ",", "a ", "$a$", "\\textbf{x", "İ", "0", "\\text{\n", ".$", "\\$"),
]


@pytest.mark.parametrize("piece", PIECES)
def test_a_hostile_megabyte_is_judged_in_linear_time(piece):
    """Quadratic work on 2^20 characters would be 10^12 steps; the linear work is about a hundred passes over 1 MB."""
    hostile = (piece * (MEGABYTE // len(piece) + 1))[:MEGABYTE]
    started = time.process_time()
    normalised(hostile)
    answer_line(hostile)
    judge("answer-line", f"Answer: {hostile}\nAnswer: 5", {"answer": "5"})
    assert time.process_time() - started < 10
