"""What of a response is taken as the program."""

import time

import pytest

from verifier.programs.extraction import NoProgramError, completed, digest, extracted

FOUND = {
    "python": ("So:\n```python\nx = 1\n```\nDone.", "x = 1\n"),
    "py": ("```py\nx = 1\n```", "x = 1\n"),
    "no language": ("```\nx = 1\n```", "x = 1\n"),
    "capital letters": ("```Python\nx = 1\n```", "x = 1\n"),
    "the last of several": ("```python\nx = 1\n```\nBetter:\n```python\nx = 2\n```\n", "x = 2\n"),
    "another language last": ("```python\nx = 1\n```\n```bash\nls\n```\n", "x = 1\n"),
    "no fence": ("x = 1\n", "x = 1\n"),
    "longer fences": ("````python\ns = '''\n```\n'''\n````", "s = '''\n```\n'''\n"),
    "an inline code": ("Use `f`:\n```python\nx = 1\n```", "x = 1\n"),
    "an indented fence": ("  ```python\nx = 1\n  ```", "x = 1\n"),
    "an output without a tag": ("```python\nx = 1\n```\nIt prints:\n```\n1\n```", "x = 1\n"),
    "an output cut off": ("```python\nx = 1\n```\nIt prints:\n```\n1", "x = 1\n"),
    "a sketch, then a tag": ("```\nloop\n```\n```python\nx = 1\n```", "x = 1\n"),
    "the last without a tag": ("```\nx = 1\n```\n```\nx = 2\n```", "x = 2\n"),
    "in a list": ("- So:\n  ```python\n  if 1:\n\n      x = 1\n  ```", "if 1:\n\n    x = 1\n"),
    "in a deep list": ("1. So:\n   - this:\n\n     ```py\n     x = 1\n     ```\n", "x = 1\n"),
    "four spaces in a list": ("1. So:\n    ```python\n    x = 1\n    ```", "x = 1\n"),
    "lines with less": ("  ```python\n  s = '''\n a\n  '''\n  ```", "s = '''\na\n'''\n"),
    "only fences indented": ("  ```python\nif 1:\n  x = 1\n  ```", "if 1:\n  x = 1\n"),
    "the rest of a function": ("```python\n    return 1\n```", "    return 1\n"),
    "a fence in a docstring": ("```python\n'''\n    ```\n'''\n```", "'''\n    ```\n'''\n"),
    "a docstring, no fence": ("def f():\n    '''\n    ```\n    - f()\n    '''\n",) * 2,
    "a list before, not around": ("- So\n\nx = (1\n     ```\n)",) * 2,
}
ABSENT = {
    "cut off": ("```python\nx = 1\n", "not closed"),
    "a second one cut off": ("```python\nx = 1\n```\n```python\nx =", "not closed"),
    "one in a list cut off": ("1. So:\n    ```python\n    x = 1\n", "not closed"),
    "only one without a tag, cut off": ("```\nx = 1\n", "not closed"),
    "another language": ("```bash\nls\n```", "no code block of Python"),
    "nothing": (" \n", "no code"),
    "an empty block": ("```python\n\n```", "no code"),
    "a long one": (f"```python\n{'x' * 300_000}\n```", "300001 characters"),
}
PROMPT = "import math\n\ndef helper(): return 1\n\ndef solve(n: int) -> int:\n    '''Solve it.'''\n"


@pytest.mark.parametrize("name", FOUND)
def test_the_program_is_found(name):
    text, program = FOUND[name]
    assert extracted(text) == program


@pytest.mark.parametrize("name", ABSENT)
def test_a_response_without_a_program_says_why(name):
    text, why = ABSENT[name]
    with pytest.raises(NoProgramError, match=why):
        extracted(text)


@pytest.mark.parametrize("body", ["    return helper()\n", "return helper()\n"])
def test_a_completion_continues_the_prompt(body):
    program = completed(body, PROMPT, "solve")
    scope = {}
    exec(program, scope)
    assert scope["solve"](1) == 1


@pytest.mark.parametrize(
    "program",
    [
        "def solve(n):\n    return math.floor(helper())\n",
        "solve = lambda n: helper()\n",
        "import os\ndef solve (n): return 1\n",
    ],
)
def test_a_whole_function_gets_what_is_before_it(program):
    scope = {}
    exec(completed(program, PROMPT, "solve"), scope)
    assert scope["solve"](1) == 1


def test_the_digest_ignores_white_space_at_ends():
    assert digest("x = 1  \n\n\ny = 2") == digest("x = 1\ny = 2\n") != digest("x = 1\n y = 2\n")


@pytest.mark.parametrize("part", ["```" + " " * 100_000 + "`", " " * 100_000 + "```" * 10_000 + "x`", "- " * 100_000])
def test_the_search_takes_linear_time(part):
    started = time.process_time()
    extracted(part)
    assert time.process_time() - started < 1
