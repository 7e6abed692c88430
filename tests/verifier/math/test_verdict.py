"""The verdict's contract: options, references, the judged answer, and the reason."""

import subprocess
import sys

import pytest

from verifier.verifiers.math.verdict import check_reference, judge


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"last_numbers": True}, r"math\.last_numbers: True is not valid: expected no option but last_number"),
        ({"last_number": 1}, r"math\.last_number: 1 is not valid: expected true or false"),
        ({"last_number": "yes"}, r"math\.last_number: 'yes' is not valid: expected true or false"),
    ],
)
def test_unknown_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        judge("Answer: 5", {"answer": "5"}, options)
    with pytest.raises(ValueError, match=message):
        check_reference({"answer": "5"}, options)


@pytest.mark.parametrize(
    "answer", ["", " ", "$$", "...", "?", "-", r"\frac{1}{2", "}", "{", r"\boxed{}", None, True, ["5"], "9" * 3000]
)
def test_a_reference_that_cannot_be_read_is_refused(answer):
    with pytest.raises(ValueError, match=r"reference answer: .* is not valid: expected "):
        check_reference({"answer": answer}, {})
    with pytest.raises(ValueError, match=r"reference answer: .* is not valid: expected "):
        judge("Answer: 5", {"answer": answer}, {})


@pytest.mark.parametrize(
    "answer", [5, 0.5, "5", r"\frac12", r"$x+1$", r"\boxed{5}", r"\text{east}", "(C)", r"\emptyset", "5 m", "a = b"]
)
def test_readable_references_are_accepted(answer):
    check_reference({"answer": answer}, {})
    assert judge(f"Answer: {answer}", {"answer": answer}, {}).correct


def test_a_missing_reference_is_a_key_error():
    with pytest.raises(KeyError, match="answer"):
        judge("Answer: 5", {}, {})


@pytest.mark.parametrize(
    ("response", "reference", "answer"),
    [
        (r"so \boxed{\frac{2}{4}}", "0.5", "1/2"),
        ("Answer: $0.50$", r"\frac12", "1/2"),
        (r"\boxed{0.25}", "0.5", "1/4"),
        (r"Answer: $\frac{1}{4}$", "0.5", "1/4"),
        (r"Answer: $1 + x$", "0.5", "1+x"),
        ("no idea", "0.5", ""),
        (r"\boxed{2, 1}", "1,2", "1, 2"),
        (r"\boxed{500 \text{ cm}}", "5 m", "5 [m]"),
        (r"\boxed{\text{C}}", r"\text{(C)}", "C"),
        (r"\boxed{(1, 1/2)}", "(1,0.5)", "(1, 1/2)"),
    ],
)
def test_the_judged_answer_is_normalised(response, reference, answer):
    assert judge(response, {"answer": reference}, {}).answer == answer


@pytest.mark.parametrize(
    ("response", "reference", "parts"),
    [
        (r"\boxed{18}", "18", ["'18'", "box", "equal numbers"]),
        ("Answer: 5 km", "5 m", ["'5 km'", "answer line", "different numbers after conversion of the unit"]),
        ("Answer: 5 kg", "5 m", ["'5 kg'", "answer line", "different unit"]),
        ("Answer: maybe 5", "5", ["hedged", "'maybe'"]),
        ("Answer: Evelyn", "evelyn", ["'Evelyn'", "'evelyn'", "same words"]),
        (r"\boxed{x+1}", "1+x", ["'x+1'", "'1+x'", "math-verify"]),
        ("nothing", "5", ["no answer found"]),
        ("it is 7", "7", ["no answer found"]),
        (r"\boxed{5} \boxed{6}", "6", ["several different boxes", "'5'"]),
        (r"\boxed{5", "5", ["truncated"]),
    ],
)
def test_the_reason_says_what_was_compared_and_how(response, reference, parts):
    found = judge(response, {"answer": reference}, {})
    assert all(part in found.reason for part in parts), found.reason


@pytest.mark.parametrize(
    "response", ["Answer: " + "x\u2028\x00" * 500, "\\boxed{" + "\x1b[31m5\n" * 400 + "}", "Answer: \ud800"]
)
def test_the_reason_is_one_short_printable_line(response):
    found = judge(response, {"answer": "5"}, {})
    assert len(found.reason) <= 300
    assert found.reason.isprintable()
    assert len(found.answer) <= 200


def test_plain_answers_need_no_symbolic_library():
    code = (
        "import sys\n"
        "from verifier.verifiers.math.verdict import check_reference, judge\n"
        "for answer in ('18', '0.5', 'Evelyn', '(1,2)', '[0,1)', '5 m', 'C', '3:4', '101_2'):\n"
        "    check_reference({'answer': answer}, {})\n"
        "    assert judge(f'Answer: {answer}', {'answer': answer}, {}).correct\n"
        "    assert not judge('Answer: 77', {'answer': answer}, {}).correct\n"
        "assert not {'sympy', 'math_verify'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_verdict_does_not_depend_on_order():
    responses = [r"\boxed{2\sqrt{3}}", r"\boxed{\sqrt{12}}", r"\boxed{3}", "Answer: maybe"]
    first = [judge(response, {"answer": r"\sqrt{12}"}, {}) for response in responses]
    assert [judge(response, {"answer": r"\sqrt{12}"}, {}) for response in reversed(responses)] == first[::-1]


@pytest.mark.parametrize(
    ("reference", "response"),
    [
        (r"We add and get \boxed{5}.", "5"),
        (r"So $x = \boxed{5 \text{ m}}$ and we are done.", "500 cm"),
        (r"First \boxed{5}, and again \boxed{5}.", "5"),
        ("Natalia sold 48/2 = 24 clips.\n#### 72", "72"),
        ("So the total is 9 * 2. The final answer is $18$. I hope it is correct.", "18"),
    ],
)
def test_a_worked_solution_is_read_by_its_answer(reference, response):
    assert judge(f"Answer: {response}", {"answer": reference}).correct
    assert not judge("Answer: 48", {"answer": reference}).correct


@pytest.mark.parametrize("later", ["The answer is 17.", "Answer: 17", "#### 17", "<answer>17</answer>"])
def test_an_answer_behind_the_box_must_be_the_same(later):
    found = judge(rf"\boxed{{18}}. {later}" if "." in later else f"\\boxed{{18}}\n{later}", {"answer": "18"})
    assert not found.correct
    assert "several different answers" in found.reason
