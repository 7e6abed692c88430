"""Owns forty tasks in MBPP's form, each with a right solution and three planted faults.

Must not need anything but the standard library.
"""

from __future__ import annotations

from typing import NamedTuple


class PlantedRecord(NamedTuple):
    """A solution, its tests, and faults: a text of the solution and what replaces it."""

    solution: str
    tests: tuple[str, str, str]
    faults: tuple[tuple[str, str], ...]


def _record(signature: str, body: str, calls: dict[str, str], **faults: str) -> PlantedRecord:
    """`calls`: arguments -> the expected value. `faults`: three pairs of texts, as `a="old => new"`."""
    name = signature.partition("(")[0]
    lines = "\n".join(f"    {line}" for line in body.strip().splitlines())
    tests = tuple(f"assert {name}({arguments}) == {expected}" for arguments, expected in calls.items())
    pairs = tuple(tuple(fault.split(" => ")) for fault in faults.values())
    assert len(tests) == 3
    assert all(len(pair) == 2 and pair[0] in lines for pair in pairs), (name, pairs)
    return PlantedRecord(f"def {signature}:\n{lines}\n", tests, pairs)  # type: ignore[arg-type]


RECORDS = (
    _record(
        "larger(a, b)",
        "return a if a > b else b",
        {"1, 2": "2", "5, 3": "5", "-1, -2": "-1"},
        a="a > b => a < b",
        b="a if => b if",
        c="else b => else 0",
    ),
    _record(
        "evens(values)",
        "return [v for v in values if v % 2 == 0]",
        {"[1, 2, 3, 4]": "[2, 4]", "[1]": "[]", "[0, -2]": "[0, -2]"},
        a="== 0 => == 1",
        b="[v for => [1 for",
        c="% 2 => % 4",
    ),
    _record(
        "reverse_words(text)",
        "return ' '.join(reversed(text.split()))",
        {"'a b c'": "'c b a'", "'one'": "'one'", "'x  y'": "'y x'"},
        a="reversed => sorted",
        b="' '.join => ''.join",
        c="text.split() => text.split(' ')",
    ),
    _record(
        "factorial(n)",
        "result = 1\nfor k in range(2, n + 1):\n    result *= k\nreturn result",
        {"0": "1", "5": "120", "20": "2432902008176640000"},
        a="n + 1 => n",
        b="result = 1 => result = 0",
        c="*= k => += k",
    ),
    _record(
        "fibonacci(n)",
        "a, b = 0, 1\nfor _ in range(n):\n    a, b = b, a + b\nreturn a",
        {"0": "0", "10": "55", "50": "12586269025"},
        a="return a => return b",
        b="0, 1 => 1, 1",
        c="range(n) => range(n - 1)",
    ),
    _record(
        "is_prime(n)",
        "return n > 1 and all(n % k for k in range(2, int(n ** 0.5) + 1))",
        {"2": "True", "49": "False", "97": "True"},
        a="n > 1 and => n < 1 and",
        b="+ 1)) => + 0))",
        c="n % k => k % n",
    ),
    _record(
        "counts(text)",
        "found = {}\nfor c in text:\n    found[c] = found.get(c, 0) + 1\nreturn found",
        {"'aab'": "{'a': 2, 'b': 1}", "''": "{}", "'zzz'": "{'z': 3}"},
        a="get(c, 0) => get(c, 1)",
        b="+ 1 => + 2",
        c="in text => in set(text)",
    ),
    _record(
        "common(a, b)",
        "return set(a) & set(b)",
        {"[1, 2], [2, 3]": "{2}", "[1], [2]": "set()", "'ab', 'ba'": "{'a', 'b'}"},
        a="& => |",
        b="& set(b) => - set(b)",
        c="set(a) => list(a)",
    ),
    _record(
        "flat(values)",
        "return [v for inner in values for v in inner]",
        {"[[1], [2, 3]]": "[1, 2, 3]", "[]": "[]", "[[], [1]]": "[1]"},
        a="[v for => [inner for",
        b="in values => in values[1:]",
        c="v in inner] => v in inner[:1]]",
    ),
    _record(
        "is_palindrome(text)",
        "kept = [c.lower() for c in text if c.isalnum()]\nreturn kept == kept[::-1]",
        {"'Never odd or even'": "True", "'ab'": "False", "''": "True"},
        a="c.lower() => c",
        b="isalnum => isspace",
        c="== kept => != kept",
    ),
    _record(
        "second_largest(values)",
        "return sorted(set(values))[-2]",
        {"[1, 3, 2]": "2", "[5, 5, 4]": "4", "[-1, -2]": "-2"},
        a="[-2] => [-1]",
        b="set(values) => list(values)",
        c="[-2] => [1]",
    ),
    _record(
        "area(radius)",
        "import math\nreturn round(math.pi * radius ** 2, 2)",
        {"1": "3.14", "2": "12.57", "0.5": "0.79"},
        a="** 2 => * 2",
        b=", 2) => , 1)",
        c="math.pi => math.e",
    ),
    _record(
        "binary(n)",
        "return bin(n)[2:]",
        {"5": "'101'", "0": "'0'", "255": "'11111111'"},
        a="[2:] => [1:]",
        b="bin => oct",
        c="[2:] => [:2]",
    ),
    _record(
        "gcd(a, b)",
        "while b:\n    a, b = b, a % b\nreturn a",
        {"12, 18": "6", "7, 3": "1", "0, 5": "5"},
        a="return a => return b",
        b="b, a % b => b, a // b",
        c="while b => if b",
    ),
    _record(
        "rotated(values, k)",
        "k = k % len(values)\nreturn values[-k:] + values[:-k] if k else values",
        {"[1, 2, 3], 1": "[3, 1, 2]", "[1, 2], 4": "[1, 2]", "[1, 2, 3, 4], 3": "[2, 3, 4, 1]"},
        a="values[-k:] + => values[k:] +",
        b="else values => else []",
        c="values[:-k] if => values[:k] if",
    ),
    _record(
        "merged(a, b)",
        "return {**a, **b}",
        {"{1: 2}, {3: 4}": "{1: 2, 3: 4}", "{1: 2}, {1: 3}": "{1: 3}", "{}, {}": "{}"},
        a="{**a, **b} => {**b, **a}",
        b="**a, => ",
        c=", **b => ",
    ),
    _record(
        "balanced(text)",
        "level = 0\nfor c in text:\n    level += 1 if c == '(' else -1\n    if level < 0:\n"
        "        return False\nreturn level == 0",
        {"'(())'": "True", "'())('": "False", "'(('": "False"},
        a="level == 0 => True",
        b="< 0 => < -5",
        c="else -1 => else 0",
    ),
    _record(
        "longest(words)",
        "return max(words, key=len)",
        {"['a', 'abc', 'ab']": "'abc'", "['b', 'a']": "'b'", "['zz', 'aaa']": "'aaa'"},
        a="max => min",
        b=", key=len => ",
        c="max(words, key=len) => words[-1]",
    ),
    _record(
        "digits(n)",
        "return sum(int(d) for d in str(abs(n)))",
        {"123": "6", "-45": "9", "0": "0"},
        a="abs(n) => n * 10 + 1",
        b="sum => max",
        c="int(d) => 1",
    ),
    _record(
        "squares(n)",
        "return [k * k for k in range(1, n + 1)]",
        {"3": "[1, 4, 9]", "0": "[]", "1": "[1]"},
        a="k * k => k + k",
        b="range(1, => range(0,",
        c="n + 1 => n",
    ),
    _record(
        "without_vowels(text)",
        "return ''.join(c for c in text if c.lower() not in 'aeiou')",
        {"'Apple'": "'ppl'", "'xyz'": "'xyz'", "'AEiou'": "''"},
        a="not in => in",
        b="c.lower() => c",
        c="aeiou => aei",
    ),
    _record(
        "transposed(rows)",
        "return [list(row) for row in zip(*rows)]",
        {"[[1, 2], [3, 4]]": "[[1, 3], [2, 4]]", "[[1], [2]]": "[[1, 2]]", "[]": "[]"},
        a="list(row) => tuple(row)",
        b="zip(*rows) => rows",
        c="list(row) => sorted(row)[::-1]",
    ),
    _record(
        "leap(year)",
        "return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)",
        {"2000": "True", "1900": "False", "2024": "True"},
        a="year % 400 == 0 => False",
        b="!= 0 or => == 0 or",
        c="% 4 == 0 and => % 4 != 0 and",
    ),
    _record(
        "median(values)",
        "ordered = sorted(values)\nmiddle = len(ordered) // 2\n"
        "return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2",
        {"[3, 1, 2]": "2", "[1, 2, 3, 4]": "2.5", "[7]": "7"},
        a="sorted(values) => values[:]",
        b="/ 2 => // 2",
        c="middle - 1 => middle",
    ),
    _record(
        "chunks(values, n)",
        "return [values[k:k + n] for k in range(0, len(values), n)]",
        {"[1, 2, 3], 2": "[[1, 2], [3]]", "[], 3": "[]", "[1, 2], 1": "[[1], [2]]"},
        a="k + n => k + n - 1",
        b="range(0, => range(1,",
        c=", n)] => , n + 1)]",
    ),
    _record(
        "caesar(text, n)",
        "return ''.join(chr((ord(c) - 97 + n) % 26 + 97) for c in text)",
        {"'abc', 1": "'bcd'", "'xyz', 3": "'abc'", "'a', 26": "'a'"},
        a="% 26 => % 27",
        b="- 97 + n => - 97 - n",
        c="+ 97) => + 98)",
    ),
    _record(
        "unique(values)",
        "return list(dict.fromkeys(values))",
        {"[2, 1, 2]": "[2, 1]", "[]": "[]", "'aba'": "['a', 'b']"},
        a="list(dict.fromkeys(values)) => sorted(set(values))",
        b="list( => set(",
        c="fromkeys(values) => fromkeys(values[1:])",
    ),
    _record(
        "power_set(values)",
        "from itertools import combinations\n"
        "return [list(c) for k in range(len(values) + 1) for c in combinations(values, k)]",
        {"[1, 2]": "[[], [1], [2], [1, 2]]", "[]": "[[]]", "[3]": "[[], [3]]"},
        a=") + 1) => ))",
        b="range( => range(1, ",
        c="list(c) => c",
    ),
    _record(
        "is_anagram(a, b)",
        "return sorted(a) == sorted(b)",
        {"'listen', 'silent'": "True", "'a', 'aa'": "False", "'ab', 'bc'": "False"},
        a="== sorted(b) => != sorted(b)",
        b="sorted(a) == sorted(b) => set(a) == set(b)",
        c="sorted(a) == sorted(b) => len(a) == len(b)",
    ),
    _record(
        "to_roman(n)",
        "text = ''\nfor value, mark in ((10, 'X'), (9, 'IX'), (5, 'V'), (4, 'IV'), (1, 'I')):\n"
        "    text += mark * (n // value)\n    n %= value\nreturn text",
        {"14": "'XIV'", "9": "'IX'", "38": "'XXXVIII'"},
        a="(9, 'IX'),  => ",
        b="(4, 'IV'),  => ",
        c="n %= value => n -= value",
    ),
    _record(
        "running(values)",
        "from itertools import accumulate\nreturn list(accumulate(values))",
        {"[1, 2, 3]": "[1, 3, 6]", "[]": "[]", "[5, -5]": "[5, 0]"},
        a="accumulate(values) => values",
        b="accumulate(values) => accumulate(values, max)",
        c="list(accumulate(values)) => list(accumulate(values))[:-1]",
    ),
    _record(
        "collatz(n)",
        "steps = 0\nwhile n != 1:\n    n = n // 2 if n % 2 == 0 else 3 * n + 1\n    steps += 1\nreturn steps",
        {"1": "0", "6": "8", "27": "111"},
        a="steps = 0 => steps = 1",
        b="3 * n + 1 => n + 1",
        c="steps += 1 => steps += n % 2",
    ),
    _record(
        "binary_search(values, wanted)",
        "low, high = 0, len(values)\nwhile low < high:\n"
        "    middle = (low + high) // 2\n    if values[middle] < wanted:\n        low = middle + 1\n    else:\n"
        "        high = middle\nreturn low if low < len(values) and values[low] == wanted else -1",
        {"[1, 3, 5], 5": "2", "[1, 3, 5], 2": "-1", "[], 1": "-1"},
        a="middle + 1 => middle",
        b="else -1 => else low",
        c="< wanted => > wanted",
    ),
    _record(
        "title(text)",
        "return ' '.join(w[:1].upper() + w[1:] for w in text.split(' '))",
        {"'ab cd'": "'Ab Cd'", "''": "''", "'aB'": "'AB'"},
        a="upper() => lower()",
        b="w[1:] => w[1:].lower()",
        c="text.split(' ') => [text]",
    ),
    _record(
        "pairs(values, total)",
        "return [(a, b) for k, a in enumerate(values)\n        for b in values[k + 1:] if a + b == total]",
        {"[1, 2, 3], 4": "[(1, 3)]", "[2, 2], 4": "[(2, 2)]", "[1], 2": "[]"},
        a="k + 1 => k",
        b="== total => != total",
        c="(a, b) => [a, b]",
    ),
    _record(
        "depth(value)",
        "return 1 + max(map(depth, value), default=0) if isinstance(value, list) else 0",
        {"[1, [2, [3]]]": "3", "[]": "1", "5": "0"},
        a="1 + max => max",
        b="max( => min(",
        c="default=0 => default=1",
    ),
    _record(
        "hamming(a, b)",
        "return sum(x != y for x, y in zip(a, b))",
        {"'abc', 'abd'": "1", "'', ''": "0", "'aa', 'bb'": "2"},
        a="!= => ==",
        b="sum => any",
        c="zip(a, b) => zip(a, a)",
    ),
    _record(
        "divisors(n)",
        "return [k for k in range(1, n + 1) if n % k == 0]",
        {"6": "[1, 2, 3, 6]", "1": "[1]", "7": "[1, 7]"},
        a="n + 1 => n",
        b="range(1, => range(2,",
        c="n % k == 0 => n % k",
    ),
    _record(
        "mean(values)",
        "return sum(values) / len(values)",
        {"[1, 2]": "1.5", "[3]": "3", "[1, 2, 6]": "3"},
        a="/ len => // len",
        b="sum(values) => max(values)",
        c="len(values) => (len(values) + 1)",
    ),
    _record(
        "grouped(words)",
        "found = {}\nfor w in words:\n    found.setdefault(w[0], []).append(w)\nreturn found",
        {"['ab', 'ac', 'b']": "{'a': ['ab', 'ac'], 'b': ['b']}", "[]": "{}", "['x']": "{'x': ['x']}"},
        a="w[0] => w[-1]",
        b=".append(w) => .insert(0, w)",
        c="found.setdefault(w[0], []).append(w) => found[w[0]] = [w]",
    ),
)
