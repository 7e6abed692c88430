"""Owns the tests of `penstock data to-integer`: which rows are rewritten, what an interruption leaves, the output.

Must not reach a model; a small server on this machine answers.
"""

from __future__ import annotations

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
        "1: the model's service refused the request",
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
