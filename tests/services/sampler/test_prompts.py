"""Prompts: each source, layout and format; unique questions; training and evaluation apart; errors name the field."""

import json
import tracemalloc
from typing import get_args

import pyarrow as pa
import pytest
from pyarrow import parquet

from services.sampler.data import DataError, PromptCursor, PromptsExhaustedError, load_evaluated, load_splits
from services.sampler.data.formats import FORMATS
from services.sampler.data.layouts import LAYOUTS
from services.sampler.data.overlap import shared
from services.sampler.data.row_rewards import BUILT_IN, REFERENCES
from services.sampler.data.sources import READERS
from services.settings import DataSettings, EvaluationSet, SourceSettings
from services.settings.rewards.kinds import KINDS
from tests.services.sampler.loading import load_set
from verifier.references import CHECKS
from verifier.verifiers.registry import VERIFIERS

pytestmark = pytest.mark.usefixtures("loaded_once")

ONE_DIGIT = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
INSTRUCTION = "Think first, and put the result behind Answer:"


def questions(prompts):
    return {prompt.messages[-1]["content"] for prompt in prompts}


def write_jsonl(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return str(path)


def write_parquet(path, rows, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.Table.from_pylist(rows), path, **options)
    return str(path)


def write_saved(folder, shards, split=None):
    """A folder as datasets.save_to_disk (5.2.0) writes it: Arrow streams and state.json."""
    folder.mkdir(parents=True)
    names = [f"data-{number:05d}-of-{len(shards):05d}.arrow" for number in range(len(shards))]
    for name, rows in zip(names, shards, strict=True):
        table = pa.Table.from_pylist(rows)
        with pa.OSFile(str(folder / name), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
    (folder / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": name} for name in names], "_split": split})
    )


def dapo_row(question, answer, index=0):
    """A row in the schema of BytedTsinghua-SIA/DAPO-Math-17k."""
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": f"{INSTRUCTION}\n\n{question}", "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule"},
        "extra_info": {"index": str(index)},
    }


def choices(field, model=SourceSettings):
    return set(get_args(model.model_fields[field].annotation))


def test_each_choice_of_the_settings_has_an_implementation():
    assert set(READERS) | {"reasoning-gym"} == choices("source")
    assert set(LAYOUTS) == choices("layout")
    assert set(FORMATS) == choices("prompt_format")
    assert set(REFERENCES) == set(CHECKS) == set(KINDS)
    assert set(BUILT_IN) == set(VERIFIERS)


def test_reasoning_gym_splits_share_no_question_and_repeat():
    data = DataSettings(options=ONE_DIGIT, train=120, held_out=64)
    first, second = load_splits(data), load_splits(data)
    assert first == second
    assert len(questions(first.train)) == 120
    assert len(questions(first.held_out)) == 64
    assert not questions(first.train) & questions(first.held_out)


def test_a_generated_source_replaces_evaluated_questions():
    data = DataSettings(options=ONE_DIGIT, train=60, held_out=10)
    same = EvaluationSet(name="same", options=ONE_DIGIT, prompts=50)
    splits = load_splits(data, (same,))
    assert (len(splits.train), len(splits.held_out), len(splits.sets["same"])) == (60, 10, 50)
    assert not questions(splits.train) & questions(splits.sets["same"])
    assert splits.report.contaminated > 0
    assert splits.held_out == load_splits(data).held_out, "the held-out prompts do not depend on the sets"


def test_cursor_gives_the_same_prompts_from_the_same_position():
    prompts = load_splits(DataSettings(options=ONE_DIGIT, train=10, held_out=5)).train
    cursor = PromptCursor(prompts, seed=3)
    drawn = [cursor.next().id for _ in range(25)]
    assert sorted(drawn[:10]) == sorted(drawn[10:20]) == sorted(prompt.id for prompt in prompts)
    assert drawn[:10] != drawn[10:20]
    assert [PromptCursor(prompts, seed=3, position=17).next().id] == drawn[17:18]


def test_the_cursor_skips_dropped_prompts_until_none_is_left():
    prompts = load_splits(DataSettings(options=ONE_DIGIT, train=3, held_out=5)).train
    first, second, third = (prompt.id for prompt in prompts)
    cursor = PromptCursor(prompts, seed=3)
    assert cursor.drop(first, "too-long")
    assert not cursor.drop(first, "too-long"), "dropped already"
    assert not cursor.drop("p999999", "too-long"), "a prompt of another split"
    assert sorted(cursor.next().id for _ in range(6)) == sorted([second, third] * 3)
    assert cursor.position in (8, 9), "each epoch skips the dropped prompt"
    assert cursor.drop(second, "refused")
    assert cursor.drop(third, "too-long")
    assert cursor.dropped == {"too-long": 2, "refused": 1}
    with pytest.raises(
        PromptsExhaustedError, match="none of the 3 training prompts can be used: 1 refused, 2 too-long"
    ):
        cursor.next()


def test_jsonl_keeps_each_question_once(tmp_path):
    rows = [{"question": f"q{n % 6}", "verifier": "pattern", "reference": {"pattern": "a"}} for n in range(12)]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    splits = load_splits(DataSettings(source="jsonl", path=path, train=4, held_out=2, suffix="!"))
    assert questions(splits.train) | questions(splits.held_out) == {f"q{n}!" for n in range(6)}
    assert (splits.report.rows, splits.report.distinct, splits.report.duplicates) == (12, 6, 6)


def test_csv_rows_have_the_names_of_the_first_line(tmp_path):
    path = tmp_path / "rows.csv"
    source = SourceSettings(source="csv", path=str(path), layout="fields")
    path.write_text('\ufeffquestion,answer\n"1 + 1,\nplease",2\n2 + 2,4\n', encoding="utf-8")
    first, second = load_set(source, None)
    assert (first.messages[-1]["content"], first.reference) == ("1 + 1,\nplease", {"answer": "2"})
    assert second.reference == {"answer": "4"}
    for text, fault in {
        "question,answer\n1,2\n3\n": "row 2: expected as many cells as the first line has names",
        "question,answer\n1,2,3\n": "row 1: expected as many cells",
        "question\n1\n": "row 1: field 'answer': missing; the row has 'question'",
        'question,answer\n"1,2\n': "cannot be read as CSV in UTF-8",
    }.items():
        path.write_text(text)
        with pytest.raises(DataError, match=rf"data\.path: '.*rows\.csv' {fault}"):
            load_set(source, None)


def test_jsonl_lines_end_at_line_feeds_and_may_be_blank(tmp_path):
    path = tmp_path / "rows.jsonl"
    row = {"question": "one\u2028question", "verifier": "math", "reference": {"answer": "1"}}
    path.write_text(json.dumps(row, ensure_ascii=False) + "\r\n\n")
    assert questions(load_set(SourceSettings(source="jsonl", path=str(path)), None)) == {"one\u2028question"}


@pytest.mark.conformance(formula="each question counts once", setting="data.layout = dapo-math-17k")
def test_duplicates_of_dapo_math_17k_are_removed(tmp_path):
    rows = [dapo_row(f"What is {n % 17}\u00b2?", str((n % 17) ** 2), n) for n in range(1700)]
    rows[40]["prompt"][0]["content"] += "  \n"  # white space does not make it another question
    rows[50]["reward_model"]["ground_truth"] = "-1"  # nor does another answer; the first answer is kept
    path = write_parquet(tmp_path / "dapo.parquet", rows, row_group_size=300)
    data = DataSettings(
        source="parquet", path=path, layout="dapo-math-17k", verifier="answer-line", train=None, held_out=2
    )
    splits = load_splits(data)
    report = splits.report
    assert (report.rows, report.distinct, report.duplicates, report.conflicts) == (1700, 17, 1683, 1)
    assert (len(splits.train), len(splits.held_out)) == (15, 2)
    assert report.text.startswith("1700 rows, 17 distinct questions, 1683 duplicates removed (1 of them with another")
    by_answer = {prompt.reference["answer"]: prompt for prompt in (*splits.train, *splits.held_out)}
    assert set(by_answer) == {str(n**2) for n in range(17)}
    [message] = by_answer["9"].messages
    assert message == {"role": "user", "content": f"{INSTRUCTION}\n\nWhat is 3\u00b2?"}, "the row's instruction is kept"
    assert {prompt.verifier for prompt in by_answer.values()} == {"answer-line"}


def test_parquet_is_read_in_batches(tmp_path):
    text = "x" * 1000
    rows = [{"question": f"{text} {n % 10}", "answer": "1", "unused": text * 3} for n in range(20_000)]
    path = write_parquet(tmp_path / "big.parquet", rows, row_group_size=20_000)
    del rows
    tracemalloc.start()
    found = load_set(SourceSettings(source="parquet", path=path, layout="fields"), None)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(found) == 10
    assert peak < 10e6, "only one batch of the 20 MB of questions is held"


def test_a_folder_of_parquet_files_is_read_in_the_order_of_names(tmp_path):
    for name, question in (("b", "second"), ("a", "first")):
        write_parquet(tmp_path / f"{name}.parquet", [{"question": question, "answer": 1}])
    found = load_set(SourceSettings(source="parquet", path=str(tmp_path), layout="fields"), None)
    assert [prompt.messages[0]["content"] for prompt in found] == ["first", "second"]


ROWS = [{"problem": f"How many are {n}?", "solution": {"final": str(n)}} for n in range(4)]
FIELDS = {"layout": "fields", "fields": {"question": "problem", "answer": "solution.final"}}


def test_saved_datasets(tmp_path):
    write_saved(tmp_path / "one", [ROWS[:3], ROWS[3:]], split="train")
    write_saved(tmp_path / "both" / "train", [ROWS])
    write_saved(tmp_path / "both" / "test", [ROWS[:1]], split="train")  # as the split of a split is saved
    (tmp_path / "both" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')

    def count(folder, split):
        return len(load_set(SourceSettings(source="hf", path=str(tmp_path / folder), split=split, **FIELDS), None))

    assert count("one", None) == count("one", "train") == count("both", "train") == 4
    assert count("both", "test") == 1
    for folder, split, message in (
        ("both", None, "split null is not valid: expected one of 'train', 'test'$"),
        ("both", "dev", "split 'dev' is not valid: expected one of 'train', 'test'$"),
        ("one", "test", "split 'test' is not valid: expected null, because it has only split 'train'$"),
    ):
        with pytest.raises(DataError, match=message):
            count(folder, split)


def test_parquet_datasets_as_the_hub_lays_them_out(tmp_path):
    write_parquet(tmp_path / "data" / "train-00000-of-00002.parquet", ROWS[:2])
    write_parquet(tmp_path / "data" / "train-00001-of-00002.parquet", ROWS[2:])
    write_parquet(tmp_path / "data" / "test-00000-of-00001.parquet", ROWS[:1])
    write_parquet(tmp_path / "converted" / "dev" / "0000.parquet", ROWS[:3])
    write_parquet(tmp_path / "twice" / "main" / "train.parquet", ROWS)
    write_parquet(tmp_path / "twice" / "socratic" / "train.parquet", ROWS)

    def load(folder, split):
        return load_set(SourceSettings(source="hf", path=str(tmp_path / folder), split=split, **FIELDS), None)

    assert [prompt.reference["answer"] for prompt in load("data", "train")] == ["0", "1", "2", "3"]
    assert len(load("data", "test")) == 1
    assert len(load("converted", None)) == len(load("converted", "dev")) == 3
    with pytest.raises(DataError, match=r"expected the path of one dataset; it has several: main, socratic$"):
        load("twice", "train")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="has no dataset"):
        load("empty", None)


def test_fields_map_a_chat_an_answer_mark_and_a_verifier(tmp_path):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
    path = write_jsonl(tmp_path / "r.jsonl", [{"talk": chat, "work": "2 #### 3\n2 + 2 = 4\n#### 4 ", "by": "pattern"}])
    fields = {"question": None, "messages": "talk", "answer": "work", "answer_after": "####", "verifier": "by"}
    source = SourceSettings(
        source="jsonl", path=path, layout="fields", fields=fields, prompt_format="dapo", suffix="\n-"
    )
    [prompt] = load_set(source, None)
    assert (prompt.verifier, prompt.reference) == ("pattern", {"pattern": "4"})
    system, user = prompt.messages
    assert system == chat[0]
    assert user["content"].startswith("2 + 2?\n\n")
    assert user["content"].endswith("\n-")
    assert "\nAnswer: " in user["content"]


def test_fields_may_map_a_whole_reference(tmp_path):
    rows = [
        {"q": "a", "v": "math", "r": {"answer": "1", "pattern": None}},
        {"q": "b", "v": "pattern", "r": {"answer": None, "pattern": "x|y"}},
    ]
    # A column has one type for both rows: each has a null in the other's field.
    path = write_parquet(tmp_path / "r.parquet", rows)
    fields = {"question": "q", "answer": None, "reference": "r", "verifier": "v"}
    found = load_set(SourceSettings(source="parquet", path=path, layout="fields", fields=fields), None)
    assert [prompt.reference for prompt in found] == [{"answer": "1"}, {"pattern": "x|y"}]


def test_a_system_prompt_comes_first_and_only_once(tmp_path):
    rows = [{"question": "q", "answer": "1"}]
    source = {"source": "jsonl", "layout": "fields", "system_prompt": "Be kind."}
    [prompt] = load_set(SourceSettings(path=write_jsonl(tmp_path / "a.jsonl", rows), **source), None)
    assert [message["role"] for message in prompt.messages] == ["system", "user"]
    chat = [{"m": [{"role": "system", "content": "x"}, {"role": "user", "content": "q"}], "answer": "1"}]
    source |= {"fields": {"question": None, "messages": "m"}}
    with pytest.raises(
        DataError, match=r"data\.system_prompt: .* is not valid: expected null, because row 1 has its own"
    ):
        load_set(SourceSettings(path=write_jsonl(tmp_path / "b.jsonl", chat), **source), None)


def test_training_excludes_evaluated_questions_wrapped_or_not(tmp_path):
    long = "How many of the first ten natural numbers are odd and prime at once?"
    short = "What is 2 + 2?"
    rows = [dapo_row(long, "3"), dapo_row("What is 1 + 1?", "2")]
    plain = [{"question": text, "answer": "1"} for text in (short, "What is 3 + 3?", f"{short} And of 12 + 2 + 2?")]
    held = [{"question": text, "answer": "1"} for text in (long, f"  {short}\n")]
    evaluated = EvaluationSet(
        name="exam", source="jsonl", path=write_jsonl(tmp_path / "exam.jsonl", held), layout="fields"
    )
    wrapped = {"source": "jsonl", "path": write_jsonl(tmp_path / "wrapped.jsonl", rows), "layout": "dapo-math-17k"}
    bare = {"source": "jsonl", "path": write_jsonl(tmp_path / "bare.jsonl", plain), "layout": "fields"}
    of_wrapped = load_splits(DataSettings(**wrapped, train=None, held_out=0), (evaluated,))
    of_bare = load_splits(DataSettings(**bare, train=None, held_out=0), (evaluated,))
    assert questions(of_wrapped.train) == {f"{INSTRUCTION}\n\nWhat is 1 + 1?"}
    assert questions(of_bare.train) == {"What is 3 + 3?", f"{short} And of 12 + 2 + 2?"}
    assert of_wrapped.report.contaminated == of_bare.report.contaminated == 1
    assert questions(of_bare.sets["exam"]) == {long, f"  {short}\n"}
    assert ", 2 in set 'exam'" in of_bare.report.text


@pytest.mark.parametrize(
    ("question", "other", "same"),
    [
        ("a b c d e f g h", "a b c d e f g h", True),
        ("x a b c d e f g h y", "a b c d e f g h", True),
        ("a b c d e f g h", "x a b c d e f g h", True),
        ("x a b c d e f g hh", "a b c d e f g h", False),  # whole words
        ("x a b c d e f g", "a b c d e f g", False),  # so few words may match by chance
        ("a b c d e f g h i", "a b c d e f g h j", False),
        ("a a a a a a a a a b", "a a a a a a a a b", True),
        ("", "a", False),
    ],
)
def test_overlap(question, other, same):
    assert shared([question, "another"], ["unlike", other]) == ({question} if same else set())


def test_a_set_is_the_first_questions_of_its_source(tmp_path):
    rows = [{"question": f"q{n // 3}", "answer": n} for n in range(30)]
    whole = {"name": "s", "source": "jsonl", "path": write_jsonl(tmp_path / "s.jsonl", rows), "layout": "fields"}

    def load(prompts):
        return load_evaluated(None, (EvaluationSet(**whole, prompts=prompts),)).sets["s"]

    assert [prompt.messages[0]["content"] for prompt in load(4)] == ["q0", "q1", "q2", "q3"]
    assert len(load(None)) == 10
    with pytest.raises(DataError, match=r"evaluation\.sets 's'\.prompts: 11 is not valid: expected at most 10"):
        load(11)


def test_a_set_without_a_question_is_rejected(tmp_path):
    source = EvaluationSet(name="s", source="jsonl", path=write_jsonl(tmp_path / "s.jsonl", []), layout="fields")
    with pytest.raises(DataError, match=r"'s'\.path: '.*s\.jsonl' is not valid: expected at least one question"):
        load_evaluated(None, (source,))


def test_train_null_takes_all_questions_that_are_not_held_out(tmp_path):
    rows = [{"question": f"q{n}", "answer": n} for n in range(30)]
    data = {"source": "jsonl", "path": write_jsonl(tmp_path / "s.jsonl", rows), "layout": "fields", "held_out": 7}
    assert len(load_splits(DataSettings(**data, train=None)).train) == 23
    assert len(load_splits(DataSettings(**data, train=5)).train) == 5
    with pytest.raises(DataError, match="expected at most 30, because the source has only 30 distinct"):
        load_splits(DataSettings(**data | {"held_out": 30}, train=None))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            DataSettings(options=ONE_DIGIT, train=190, held_out=64),
            r"data\.train \+ data\.held_out: 254 is .* 200",
        ),
        (DataSettings(task="no_such_task"), "data.task: 'no_such_task' is not valid"),
        (DataSettings(options={"min_terms": 0}), "min_terms"),
        (DataSettings(source="jsonl", path="/no/such.jsonl"), "data.path: '/no/such.jsonl' cannot be read"),
        (
            DataSettings(source="parquet", path="/no/such.parquet"),
            "data.path: '/no/such.parquet' cannot be read as Parquet",
        ),
        (
            DataSettings(source="hf", path="/no/such"),
            r"data.path: '/no/such' is not valid: expected .*save_to_disk.*; it is not a folder",
        ),
    ],
)
def test_errors_name_the_field(data, message):
    with pytest.raises(DataError, match=message):
        load_splits(data)


GOOD = {"question": "a", "verifier": "math", "reference": {"answer": "1"}}
CHAT = {"layout": "fields", "fields": {"question": None, "messages": "m"}}
ANSWER = {"layout": "fields"}


@pytest.mark.parametrize(
    ("bad", "source", "message"),
    [
        ("{", {}, "row 2: not JSON"),
        ("[1]", {}, "row 2: it is a list, which is not valid: expected an object"),
        ({"question": "b"}, {}, "row 2: field 'verifier': missing; the row has 'question'"),
        (GOOD | {"question": " "}, {}, "row 2: field 'question': ' ' is not valid"),
        (GOOD | {"question": 3}, {}, "row 2: field 'question': 3 is not valid"),
        (GOOD | {"verifier": "maths"}, {}, "'verifier': 'maths' is not valid: expected one of answer-line, math,"),
        (GOOD | {"reference": "x"}, {}, "'reference': 'x' is not valid: expected an object, or"),
        (GOOD | {"reference": []}, {}, r"'reference': \[\] is not valid: expected an object"),
        (GOOD | {"reference": {"pattern": "x"}}, {}, "'reference': .* expected answer for verifier 'math'"),
        ({"question": "b", "answer": None}, ANSWER, "'answer': null is not valid: expected text or a number"),
        ({"question": "b", "answer": True}, ANSWER, "'answer': true is not valid"),
        ({"question": "b", "answer": "4"}, ANSWER | {"fields": {"answer_after": "##"}}, "'4' .* text after '##'"),
        ({"m": [], "answer": 1}, CHAT, r"'m': \[\] is not valid: expected a list of objects with role"),
        ({"m": [{"role": "user"}], "answer": 1}, CHAT, "'m': message {'role': 'user'} is not valid"),
        (
            {"m": [{"role": "assistant", "content": "x"}], "answer": 1},
            CHAT,
            "'m': last message .* expected a user message",
        ),
        ({"prompt": [], "reward_model": {}}, {"layout": "dapo-math-17k"}, r"'reward_model\.ground_truth': missing"),
    ],
)
def test_the_error_of_a_row_names_field_value_and_expectation(tmp_path, bad, source, message):
    good = GOOD | {"answer": "#### 1 ## 1", "m": [{"role": "user", "content": "a"}]}
    good |= {"prompt": good["m"], "reward_model": {"ground_truth": "1"}}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(good) + "\n" + (bad if isinstance(bad, str) else json.dumps(bad)) + "\n")
    with pytest.raises(DataError, match=rf"data\.path: '{path}' row 2") as caught:
        load_set(SourceSettings(source="jsonl", path=str(path), **source), None)
    assert caught.match(message)


def test_the_error_of_a_missing_column_lists_the_columns(tmp_path):
    path = write_parquet(tmp_path / "r.parquet", [{"problem": "a", "answer": "1"}])
    with pytest.raises(DataError, match=r"has no column 'question'; its columns are 'problem', 'answer'"):
        load_set(SourceSettings(source="parquet", path=path, layout="fields"), None)
    nested = {"question": "problem", "answer": "answer.final"}
    with pytest.raises(DataError, match=r"row 1: field 'answer\.final': missing"):
        load_set(SourceSettings(source="parquet", path=path, layout="fields", fields=nested), None)


def test_a_damaged_file_is_named(tmp_path):
    (tmp_path / "r.parquet").write_bytes(b"PAR1 no more")
    with pytest.raises(DataError, match=r"r\.parquet' cannot be read as Parquet"):
        load_set(SourceSettings(source="parquet", path=str(tmp_path / "r.parquet")), None)
    write_saved(tmp_path / "saved", [ROWS])
    (tmp_path / "saved" / "data-00000-of-00001.arrow").write_bytes(b"\0" * 100)
    with pytest.raises(DataError, match=r"data-00000-of-00001\.arrow' cannot be read as an Arrow stream"):
        load_set(SourceSettings(source="hf", path=str(tmp_path / "saved"), **FIELDS), None)
