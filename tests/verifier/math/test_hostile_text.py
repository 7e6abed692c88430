"""Hostile responses: each is judged in bounded time, without an exception other than an undecided verdict."""

import contextlib
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verifier.verifiers.base import UndecidedError
from verifier.verifiers.math.verdict import judge

HOSTILE = {
    "nested braces": "\\boxed{" + "{" * 100_000 + "1" + "}" * 100_000 + "}",
    "open boxes": "\\boxed{" * 100_000,
    "different boxes": "".join(f"\\boxed{{{number}}}" for number in range(20_000)),
    "marks": "Answer: " * 100_000,
    "stars": "Answer: " + "*" * 19_000,
    "underscores": "Answer: " + "_" * 19_000 + "x",
    "spaces": "Answer: 1" + " " * 1_900 + "x",
    "parentheses": "Answer: " + "(" * 15_000 + "1" + ")" * 15_000,
    "digits": "\\boxed{" + "9" * 1_900 + "}",
    "numbers": "Answer: " + "1,234 " * 300,
    "list": "Answer: " + "1," * 900,
    "conjunctions": "Answer: " + "1 and " * 300 + "1",
    "equations": "Answer: " + "x=" * 900 + "1",
    "dollars": "Answer: " + "$" * 19_000,
    "amounts": "Answer: " + "$1 " * 600,
    "plus-minus": "Answer: " + r"\pm 1" * 150,
    "unions": "Answer: " + r"(0,1) \cup " * 100 + "(0,1)",
    "sets": "Answer: " + "\\{" * 100 + "1" + "\\}" * 100,
    "choices": "A: " * 6_000,
    "hedges": "Answer: 5" + " or maybe" * 200,
    "units": "Answer: 5 " + "m/" * 600 + "s",
    "signs": r"\boxed{" + "-" * 300 + "1}",
    "subscripts": "Answer: " + "_a" * 190 + "+=5",
    "words": "Answer: " + "very " * 380,
    "controls": "Answer: 6\x00\ud800\u202e\u200b",
    "text": r"\boxed{" + r"\text{a}" * 250 + "}",
}


@pytest.mark.parametrize("reference", ["5", "x+1", r"\text{east}", "(1,2)", "1,2", "5 m", "C", r"\sqrt{3}"])
def test_hostile_text_is_judged_in_time(reference):
    judge(r"\boxed{\sqrt{x}}", {"answer": r"\sqrt{y}"}, {})  # loads the libraries
    for name, text in HOSTILE.items():
        started = time.process_time()
        with contextlib.suppress(UndecidedError):
            assert not judge(text, {"answer": reference}, {}).correct, name
        assert time.process_time() - started < 1.0, name


SIGNS = "0123456789+-*/^_{}()[]=<>,.;:!?$%|&~'\" \nxABm\u00bd\u20ac\ud800\x00"
COMMANDS = (r"\boxed{", r"\frac", r"\sqrt", r"\text{", r"\pm", r"\cup", r"\{", r"\}", "\\\\")
PHRASES = ("Answer: ", "answer is ", "####", " or ", " and ", "pi", "(B)", "km")
PIECES = st.sampled_from([*SIGNS, *COMMANDS, *PHRASES])


@settings(max_examples=300, deadline=None)
@given(st.lists(PIECES, max_size=25).map("".join), st.sampled_from(["5", "1,2", r"\text{east}", "(0,1]", "5 m", "B"]))
def test_any_text_is_judged(text, reference):
    for response in (text, f"Answer: {text}"):
        try:
            found = judge(response, {"answer": reference}, {"last_number": True})
        except UndecidedError:
            continue
        assert found.reason.isprintable()
        assert len(found.reason) <= 300
        assert found == judge(response, {"answer": reference}, {"last_number": True})
