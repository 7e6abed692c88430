"""The files beside a recipe: errors name file, setting and what is expected, and no text can end the check."""

import time

import pytest

from services.settings import RecipeError, check_files, parse_recipe
from services.settings.rewards.files import MOST_BYTES, MOST_BYTES_TOGETHER, MOST_FILES
from tests.harness.small_run import recipe_document

REWARDS, OTHER, RUBRIC = "./rewards.py", "./other.py", "./rubric.md"
SCORE = "def score(prompt, response, reference, metadata):\n    return 1.0\n"
ROWS = {"source": "jsonl", "path": "/rows.jsonl", "layout": "fields", "options": {}}


def recipe(reward="math", **sections):
    data = {**ROWS, "verifier": reward}
    return parse_recipe(recipe_document("/model", data=data, **sections))


def python(file=REWARDS, function="score"):
    return f"python:{file}:{function}"


def judge():
    return {"judge": {"url": "http://judge/v1", "model": "m", "rubric": RUBRIC}}


def listing(names):
    """A recipe with `verifier.files`."""
    return recipe(verifier={"files": names})


def faults(checked, files):
    with pytest.raises(RecipeError) as error:
        check_files(checked, files)
    return str(error.value).split("\n")


def test_valid_files_of_all_settings_are_accepted():
    names = {"mine": python(OTHER, "Grade")}
    checked = recipe({"all": [python(), judge(), "mine"]}, verifier={"rewards": names, "files": ["./lib/words.txt"]})
    assert checked.reward_files == (REWARDS, RUBRIC, OTHER, "./lib/words.txt")
    other = "class Grade:\n    pass\n"
    check_files(checked, {REWARDS: SCORE, RUBRIC: "Is it right?", OTHER: other, "./lib/words.txt": ""})
    check_files(recipe(), {})


def test_a_source_that_is_generated_names_no_file():
    document = recipe_document("/model", data={"verifier": python()})
    check_files(parse_recipe(document), {})


@pytest.mark.parametrize(
    ("sections", "setting"),
    [
        ({"data": {**ROWS, "verifier": python()}}, "data.verifier"),
        ({"data": ROWS, "verifier": {"rewards": {"mine": python()}}}, "verifier.rewards.mine"),
        ({"data": ROWS, "verifier": {"files": [REWARDS]}}, "verifier.files"),
        (
            {"evaluation": {"sets": [{"name": "aime", **ROWS, "verifier": python()}]}},
            "evaluation.sets 'aime'.verifier",
        ),
    ],
)
def test_a_missing_file_is_named_with_its_setting(sections, setting):
    checked = parse_recipe(recipe_document("/model", **sections))
    assert faults(checked, {}) == [f"files: none is not valid: expected './rewards.py', which {setting} names"]


def test_a_missing_and_a_surplus_file_are_both_named():
    found = faults(recipe(python()), {OTHER: SCORE, "../rewards.py": SCORE})
    given = "'./other.py', '../rewards.py'"
    assert found == [
        f"files: {given} is not valid: expected './rewards.py', which data.verifier names",
        "files: '../rewards.py' is not valid: expected one that the recipe names: './rewards.py'",
        "files: './other.py' is not valid: expected one that the recipe names: './rewards.py'",
    ]
    [found] = faults(recipe(), {REWARDS: SCORE})
    assert found == "files: './rewards.py' is not valid: expected none, because the recipe names no file"


def test_files_have_bounds():
    checked = recipe(python())
    exact = SCORE + "#" * (MOST_BYTES - len(SCORE))
    check_files(checked, {REWARDS: exact})
    [found] = faults(checked, {REWARDS: exact[:-1] + "é"})
    assert found == f"files './rewards.py': {MOST_BYTES + 1} is not valid: expected at most {MOST_BYTES} bytes of UTF-8"
    names = [f"./{number}.txt" for number in range(MOST_FILES + 1)]
    whole = MOST_BYTES_TOGETHER // MOST_BYTES
    texts = dict.fromkeys(names[:whole], "a" * MOST_BYTES)
    check_files(listing(names[:whole]), texts)
    [found] = faults(listing(names[: whole + 1]), texts | {names[whole]: "a"})
    assert found.startswith(f"files: {MOST_BYTES_TOGETHER + 1} is not valid: expected at most {MOST_BYTES_TOGETHER} ")
    [found] = faults(listing(names), dict.fromkeys(names, ""))
    assert found == f"files: {MOST_FILES + 1} is not valid: expected a recipe that names at most {MOST_FILES} of them"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (SCORE + "#\0", r"files './rewards.py': '\x00' is not valid: expected a text without NUL (it is character 67)"),
        ("# \ud800", r"files './rewards.py': '\ud800' is not valid: expected a text that can be written as UTF-8"),
        (
            "import re\ndef score(:\n",
            "files './rewards.py': 'def score(:' is not valid: expected Python (line 2: invalid syntax)",
        ),
        (
            "def grade(): ...\ndef _own(): ...\nLIMIT = 3\n",
            "data.verifier: './rewards.py:score' is not valid: expected a function that './rewards.py' defines at top "
            "level: it has 'LIMIT', 'grade'",
        ),
        (
            "class A:\n    def score(self): ...\ndef f():\n    score = 1\nfound = [score for score in ()]\n",
            "data.verifier: './rewards.py:score' is not valid: expected a function that './rewards.py' defines at top "
            "level: it has 'A', 'f', 'found'",
        ),
        (
            "",
            "data.verifier: './rewards.py:score' is not valid: expected a function that './rewards.py' defines at top ",
        ),
    ],
)
def test_a_python_file_must_parse_and_have_its_function(text, expected):
    [found] = faults(recipe(python()), {REWARDS: text})
    assert found.startswith(expected), found


@pytest.mark.parametrize(
    "text",
    [
        SCORE,
        "async def score(): ...",
        "class score: ...",
        "from rules import grade as score",
        "import score.deep",
        "from rules import *",
        "score = print",
        "score: object = print",
        "first, (score, *rest) = 1, (2, 3)",
        "try:\n    from fast import score\nexcept ImportError:\n    pass",
        "if True:\n    pass\nelse:\n    def score(): ...",
        "with open('x') as score: ...",
        "PATTERN = '\\d'\ndef score(): ...",  # Python warns of the escape
    ],
)
def test_ways_to_define_the_function(text):
    check_files(recipe(python()), {REWARDS: text})


HOSTILE = {
    "signs": "score = " + "-" * (MOST_BYTES - 20) + "1",
    "calls": "score" + "()" * (MOST_BYTES // 2 - 10),
    "attributes": "score" + ".a" * (MOST_BYTES // 2 - 10),
    "sums": "score = 1" + "+1" * (MOST_BYTES // 2 - 10),
    "conditions": "score = " + "1 if 1 else " * (MOST_BYTES // 12 - 10) + "1",
    "branches": "if 1: pass\n" + "elif 1: pass\n" * (MOST_BYTES // 13 - 10),
    "brackets": "score = " + "(" * (MOST_BYTES - 20),
    "digits": "score = " + "1" * (MOST_BYTES - 20),
    "indents": "".join(" " * depth + "if 1:\n" for depth in range(500)),
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_nesting_is_an_error_and_ends_soon(text):
    began = time.process_time()
    [found] = faults(recipe(python()), {REWARDS: text})
    assert found.startswith("files './rewards.py': "), found
    assert " is not valid: expected Python" in found
    assert len(found) < 500
    assert time.process_time() - began < 5


def test_all_faults_of_contents_are_named_at_once():
    checked = recipe({"any": [python(), python(function="grade"), judge()]}, verifier={"files": [OTHER]})
    found = faults(checked, {REWARDS: "score = 1", RUBRIC: " \n", OTHER: "def"})
    assert [line.partition(" is not valid")[0] for line in found] == [
        "files './other.py': 'def'",
        "data.verifier: './rewards.py:grade'",
        r"files './rubric.md': ' \n'",
    ]
    assert found[2].endswith("expected the rubric that data.verifier names")


def test_names_that_no_folder_can_hold_are_refused():
    names = ["./digests.json", "./a", "./a/b.py"]
    found = faults(listing(names), dict.fromkeys(names, ""))
    assert found == [
        "verifier.files: './digests.json' is not valid: expected another name, because digests.json in a run's folder "
        "lists its files",
        "verifier.files: './a/b.py' is not valid: expected no file below './a', which is a file itself",
    ]
