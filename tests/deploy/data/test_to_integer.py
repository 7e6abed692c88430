"""Owns the tests of `penstock data to-integer`: which rows are rewritten, what an interruption leaves, the output.

Must not reach a model; a small server on this machine answers.
"""

from __future__ import annotations

import gc
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from deploy.cli.data.rewriting import Problem, RewriteError, check_confirmed, is_integer, read_rewrite
from services.sampler.data import load_splits
from services.settings import DataSettings
from tests.deploy.command_line import penstock
from tests.deploy.data.chat_server import ChatServer, chat_server

ROWS = [{"question": f"Find x{n}.", "answer": f"{2 * n + 1}/2" if n % 2 else n} for n in range(8)]


def rewritten(asked: dict[str, Any]) -> str:
    """What a good model answers: 7/2 is 9, the sum of numerator and denominator."""
    answer = sum(map(int, asked["answer"].split("/")))
    if "new_problem" in asked:
        return json.dumps({"valid": True, "answer": answer})
    return json.dumps({"question": f"{asked['problem']} It is m/n in lowest terms; find m + n.", "answer": answer})


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def to_integer(chat: ChatServer, source: Path, output: Path, *arguments: str) -> tuple[int, str]:
    return penstock("data", "to-integer", str(source), str(output), "--url", chat.url, "--model", "m", *arguments)


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_answers_become_integers_in_order(tmp_path: Path) -> None:
    source, output = write_rows(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl"
    with chat_server(rewritten) as chat:
        status, text = to_integer(chat, source, output, "--check")
    assert (status, text) == (0, "8 rows: 4 copied, 4 rewritten, 0 failed\n")
    rows = read_rows(output)
    assert [row["row"] for row in rows] == list(range(1, 9))
    assert [row["answer"] for row in rows] == ["0", "5", "2", "9", "4", "13", "6", "17"]
    assert (rows[2]["question"], "original" in rows[2]) == ("Find x2.", False)
    assert rows[3]["question"] == "Find x3. It is m/n in lowest terms; find m + n."
    assert rows[3]["original"] == {"question": "Find x3.", "answer": "7/2"}
    assert sorted(chat.problems) == sorted(2 * ["Find x1.", "Find x3.", "Find x5.", "Find x7."])
    confirmed = [asked for asked in chat.asked if "new_problem" in asked]
    assert len(confirmed) == 4
    assert not any("new_answer" in asked for asked in confirmed)


def test_the_output_is_data_of_a_run(tmp_path: Path) -> None:
    source, output = write_rows(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl"
    with chat_server(rewritten) as chat:
        assert to_integer(chat, source, output)[0] == 0
    data = DataSettings(source="jsonl", path=str(output), layout="fields", train=None, held_out=2)
    splits = load_splits(data)
    assert len(splits.train) == 6
    assert {prompt.reference["answer"] for prompt in splits.train} <= {"0", "5", "2", "9", "4", "13", "6", "17"}


ANSWERS = {
    "Find x1.": '{"question": "", "answer": null}',
    "Find x3.": "no JSON",
    "Find x5.": '{"question": "Find x5, then m + n.", "answer": "1/2"}',
    "Find x7.": 400,
}


@pytest.mark.parametrize("keep", [False, True])
def test_rows_that_fail_are_counted(tmp_path: Path, keep: bool) -> None:
    source, output = write_rows(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl"
    with chat_server(lambda asked: ANSWERS[asked["problem"]]) as chat:
        status, text = to_integer(chat, source, output, *(["--keep-failed"] if keep else []))
    assert status == 0
    assert text.startswith(
        "8 rows: 4 copied, 0 rewritten, 4 failed and " + ("kept as they were" if keep else "dropped")
    )
    for cause in (
        "1: the model gave no new problem",
        "1: the model's answer is no JSON object",
        "1: the new answer is no integer",
        '1: the model\'s service refused the request: 127.0.0.1: status 400: {"error": "no"}',
    ):
        assert cause in text
    rows = read_rows(output)
    assert len(rows) == (8 if keep else 4)
    if keep:
        assert (rows[1]["answer"], rows[1]["failed"]) == ("3/2", "the model gave no new problem")


def test_the_check_drops_another_integer(tmp_path: Path) -> None:
    def answered(asked: dict[str, Any]) -> str:
        if "new_problem" not in asked:
            return rewritten(asked)
        return json.dumps({"valid": asked["problem"] != "Find x1.", "answer": 9})

    source, output = write_rows(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl"
    with chat_server(answered) as chat:
        status, text = to_integer(chat, source, output, "--check")
    assert status == 0
    assert "4 copied, 1 rewritten, 3 failed and dropped" in text
    assert "2: the check found another integer" in text
    assert "1: the check rejected the new problem" in text


def test_an_interrupted_command_continues(tmp_path: Path) -> None:
    source, output = write_rows(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl"
    broken = ["Find x5."]

    def answered(asked: dict[str, Any]) -> str | int:
        return 401 if asked["problem"] in broken else rewritten(asked)

    with chat_server(answered) as chat:
        status, text = to_integer(chat, source, output, "--concurrency", "1")
        assert status == 2
        assert "status 401" in text
        assert "the same command continues it" in text
        assert [row["row"] for row in read_rows(output)] == [1, 2, 3, 4, 5]
        with output.open("a") as file:
            file.write('{"question": "cut o')
        broken.clear()
        chat.asked.clear()
        status, text = to_integer(chat, source, output)
        assert (status, text) == (0, "3 rows: 1 copied, 2 rewritten, 0 failed; 5 were there before\n")
        assert sorted(chat.problems) == ["Find x5.", "Find x7."]
        assert [row["row"] for row in read_rows(output)] == list(range(1, 9))
        whole = output.read_bytes()
        assert to_integer(chat, source, output)[0] == 0
        assert output.read_bytes() == whole
        write_rows(source, [{"question": "Another.", "answer": 1}, *ROWS[1:]])
        status, text = to_integer(chat, source, output)
        assert status == 2
        assert "expected lines of INPUT, but row 1 differs" in text


@pytest.mark.parametrize("content", ['{"question":"q1","answer":"1/2"}', '{"row": 1}\n', '{"row": 1, "digest": "x"}\n'])
@pytest.mark.parametrize("name", ["in.jsonl", "same.jsonl", "foreign.jsonl"])
def test_a_foreign_output_stays_as_it_is(tmp_path: Path, name: str, content: str) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / name
    for path in (source, tmp_path / "foreign.jsonl"):
        path.write_text(content)
    (tmp_path / "same.jsonl").hardlink_to(source)
    with chat_server(rewritten) as chat:
        status, text = to_integer(chat, source, output)
    expected = "a new file, or one that this command wrote" if name == "foreign.jsonl" else "another file than INPUT"
    assert (status, chat.asked, output.read_text()) == (2, [], content)
    assert f"OUTPUT: {str(output)!r} is not valid: expected {expected}" in text


@pytest.mark.parametrize("concurrency", ["1", "8"])
def test_a_service_without_json_mode_is_used(tmp_path: Path, concurrency: str) -> None:
    source, output = write_rows(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl"
    with chat_server(rewritten) as chat:
        chat.json_mode = False
        status, text = to_integer(chat, source, output, "--concurrency", concurrency)
        assert (status, text) == (0, "8 rows: 4 copied, 4 rewritten, 0 failed\n")
        assert 1 <= chat.wanted_json <= int(concurrency)
        assert len(chat.asked) == 4 + chat.wanted_json


def test_a_refused_row_does_not_end_json_mode(tmp_path: Path) -> None:
    source, output = write_rows(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl"
    with chat_server(lambda asked: 400 if asked["problem"] == "Find x3." else rewritten(asked)) as chat:
        status, text = to_integer(chat, source, output, "--concurrency", "1")
    assert (status, chat.wanted_json, len(chat.asked)) == (0, 4, 4)
    assert "3 rewritten, 1 failed" in text


@pytest.mark.parametrize("rows", [2, 8])
@pytest.mark.parametrize("refusal", [400, 404, 422])
def test_a_service_that_refuses_all_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: int, rows: int
) -> None:
    monkeypatch.setenv("MY_KEY", "secret-of-the-test")
    source, output = write_rows(tmp_path / "in.jsonl", ROWS[:rows]), tmp_path / "out.jsonl"
    with chat_server(lambda _: refusal) as chat:
        chat.said = f"the model m\nis not secret-of-the-test {'x' * 5000}"
        status, text = to_integer(chat, source, output, "--key", "MY_KEY", "--keep-failed")
        assert (status, len(read_rows(output))) == (2, 1)
        assert f'status {refusal}: {{"error": "the model m' in text
        assert ("secret-of" not in text, len(text) < 600, text.count("\n")) == (True, True, 1), text
        chat.answer = rewritten
        assert to_integer(chat, source, output)[0] == 0
    assert [row["row"] for row in read_rows(output)] == list(range(1, rows + 1))


@pytest.mark.parametrize("refused", [["Find x1.", "Find x3."], ["Find x5.", "Find x7."]])
def test_refused_rows_are_dropped_if_others_are_not(tmp_path: Path, refused: list[str]) -> None:
    source, output = write_rows(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl"
    with chat_server(lambda asked: 400 if asked["problem"] in refused else rewritten(asked)) as chat:
        status, text = to_integer(chat, source, output, "--concurrency", "1")
        assert (status, "4 copied, 2 rewritten, 2 failed and dropped" in text) == (0, True)
        assert [row["row"] for row in read_rows(output)] == [n for n in range(1, 9) if f"Find x{n - 1}." not in refused]
        assert to_integer(chat, source, output)[0] == 0  # nothing but refused rows is left


def test_the_summary_bounds_causes(tmp_path: Path) -> None:
    def answered(asked: dict[str, Any]) -> str | int:
        chat.said = f"too long: {asked['problem']}"
        return rewritten(asked) if asked["problem"] == "Find x0." else 400

    rows = [{"question": f"Find x{n}.", "answer": f"{n}/7"} for n in range(20)]
    source, output = write_rows(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    with chat_server(answered) as chat:
        status, text = to_integer(chat, source, output, "--concurrency", "1")
    assert (status, text.count("too long: ")) == (0, 10)
    assert "; 9: other causes)" in text


def test_an_error_is_printed_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    another = threading.Event()

    def answered(asked: dict[str, Any]) -> int:
        if asked["problem"] == "Find x2.":
            another.set()  # with two requests at once, x1 has failed before
        elif asked["problem"] == "Find x0.":
            assert another.wait(timeout=5)
        return 401

    rows = [{"question": f"Find x{n}.", "answer": f"{n}/7"} for n in range(12)]
    source, output = write_rows(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    with chat_server(answered) as chat:
        status, text = to_integer(chat, source, output, "--concurrency", "2")
    gc.collect()  # an error that was not retrieved is logged here
    assert (status, text.count("\n"), "status 401" in text) == (2, 1, True)
    assert not caplog.records


def test_all_requests_have_their_attempts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    failed: set[str] = set()

    def answered(asked: dict[str, Any]) -> str | int:
        problem = asked["problem"]
        if problem not in failed:
            failed.add(problem)
            return 503
        return rewritten(asked)

    rows = [{"question": f"Find x{n}.", "answer": f"{n}/7"} for n in range(8)]
    source, output = write_rows(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    with chat_server(answered) as chat:
        status, text = to_integer(chat, source, output, "--attempts", "2")
    assert (status, text) == (0, "8 rows: 0 copied, 8 rewritten, 0 failed\n")
    assert not any("no request is sent" in record.message for record in caplog.records)


def test_requests_at_once_are_bounded(tmp_path: Path) -> None:
    met = threading.Barrier(3, timeout=5)

    def answered(asked: dict[str, Any]) -> str:
        met.wait()  # three are in flight, or the test fails
        return rewritten(asked)

    rows = [{"question": f"Find x{n}.", "answer": f"{n}/7"} for n in range(12)]
    source, output = write_rows(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    with chat_server(answered) as chat:
        assert to_integer(chat, source, output, "--concurrency", "3")[0] == 0
        assert chat.most == 3
    assert [row["row"] for row in read_rows(output)] == list(range(1, 13))


def test_a_key_is_sent_and_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, output = write_rows(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl"
    with chat_server(lambda _: 403) as chat:
        status, text = to_integer(chat, source, output, "--key", "MY_KEY")
        assert (status, "the variable MY_KEY is not set" in text) == (2, True)
        monkeypatch.setenv("MY_KEY", "secret-of-the-test")
        status, text = to_integer(chat, source, output, "--key", "MY_KEY")
        assert (status, "secret-of" in text) == (2, False)
        assert chat.headers[0]["authorization"] == "Bearer secret-of-the-test"


def test_a_layout_of_recipes_is_read(tmp_path: Path) -> None:
    chat_row = {"prompt": [{"role": "user", "content": "Find y."}], "reward_model": {"ground_truth": "3/4"}}
    mapped = {"text": "Find z.", "solution": "So it is #### 5/6"}
    with chat_server(rewritten) as chat:
        for row, arguments, answer in (
            (chat_row, ["--layout", "dapo-math-17k"], "7"),
            (mapped, ["--question", "text", "--answer", "solution", "--answer-after", "####"], "11"),
        ):
            source, output = write_rows(tmp_path / "in.jsonl", [row]), tmp_path / f"{answer}.jsonl"
            status, text = to_integer(chat, source, output, *arguments)
            assert status == 0, text
            assert read_rows(output)[0]["answer"] == answer


@pytest.mark.parametrize(
    ("name", "content", "arguments", "expected"),
    [
        ("in.txt", "", [], "INPUT: "),
        ("in.jsonl", '{"question": "?"}\n', [], "row 1: field 'answer': missing"),
        ("in.jsonl", "{\n", [], "row 1: not JSON"),
        ("in.jsonl", "", ["--layout", "x"], "layout"),
        ("in.jsonl", "", ["--url", "ftp://x"], "url"),
    ],
)
def test_errors_are_one_line(tmp_path: Path, name: str, content: str, arguments: list[str], expected: str) -> None:
    source = tmp_path / name
    source.write_text(content)
    with chat_server(rewritten) as chat:
        status, text = to_integer(chat, source, tmp_path / "out.jsonl", *arguments)
    assert status == 2
    assert expected in text
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("answer", "known"),
    [("5", True), ("-12", True), ("1,234", True), ("1,23", False), ("5.0", False), ("$5$", False), ("", False)],
)
def test_integers_are_known(answer: str, known: bool) -> None:
    assert is_integer(answer) is known


@pytest.mark.parametrize(
    "content",
    [
        "[1]",
        "{" * 10_000,
        '{"question": "q", "answer": true}',
        '{"question": "q", "answer": 1.5}',
        '{"question": "Same  Problem", "answer": 5}',
        '{"question": 5, "answer": 5}',
        json.dumps({"question": "q" * 50_000, "answer": 5}),
        '{"question": "q", "answer": ' + "9" * 5000 + "}",
    ],
)
def test_bad_answers_of_a_model_do_not_count(content: str) -> None:
    with pytest.raises(RewriteError):
        read_rewrite(Problem("same problem", "1/2"), content)
    with pytest.raises(RewriteError):
        check_confirmed(Problem("q", "5"), content)


def test_an_answer_in_a_fence_counts() -> None:
    found = read_rewrite(Problem("p", "1/2"), 'Sure:\n```json\n{"question": " p, m + n? ", "answer": "1,003"}\n```')
    assert found == Problem("p, m + n?", "1003")
