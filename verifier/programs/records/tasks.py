"""Owns the internal form of every record: a task with tests, and what each test sends into a jail and reads from it.

Must not know where a record came from.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from verifier.programs.extraction import before_definition, completed
from verifier.programs.inside.encoding import NotPlainError, decode, encode, loads
from verifier.programs.records.comparing import evaluate, first_difference, same_output, same_value, shown

Frame = Mapping[str, Any]
ROOM_BYTES = 1 << 16


@dataclass(frozen=True)
class TestOutcome:
    """Whether one test passed; if not, why, in at most about 200 characters."""

    passed: bool
    why: str = ""


class UnusableTestError(ValueError):
    """A test's own code cannot be run against a program in another process."""


class ProgramTest(Protocol):
    """One test, or several that one process runs."""

    @property
    def count(self) -> int:
        """How many outcomes it has."""

    def case(self) -> dict[str, Any]:
        """What the program's process gets."""

    def unseen(self) -> dict[str, Any] | None:
        """What only the checker's process gets."""

    def outcomes(self, frame: Frame) -> list[TestOutcome]:
        """Read what the processes left, when no limit was exceeded."""


@dataclass(frozen=True)
class OutputTest:
    """The output of the program as a script, for an input."""

    stdin: str
    stdout: str
    count: int = 1

    def case(self) -> dict[str, Any]:
        """See ProgramTest."""
        return {"kind": "output", "stdin": self.stdin, "room": _room(self.stdout)}

    def unseen(self) -> None:
        """Nothing."""

    def outcomes(self, frame: Frame) -> list[TestOutcome]:
        """See ProgramTest; a program that exits with another status than 0 has failed."""
        if frame["status"] != 0:
            return [TestOutcome(False, f"{ended(frame['status'])}{_last_line(frame['stderr'])}")]
        if same_output(self.stdout, frame["stdout"]):
            return [TestOutcome(True)]
        expected, found = first_difference(self.stdout, frame["stdout"])
        return [TestOutcome(False, f"expected {shown(expected)}, got {shown(found)}")]


@dataclass(frozen=True)
class ValueTest:
    """An assert that was divided: the program's process computes `inside`, and `outside` is true of the values."""

    inside: tuple[str, ...]
    outside: ast.expr
    setup: str = ""
    aliases: Mapping[str, str] = field(default_factory=dict)
    count: int = 1

    def case(self) -> dict[str, Any]:
        """See ProgramTest."""
        aliases = dict(self.aliases)
        return {
            "kind": "values",
            "setup": self.setup,
            "expressions": self.inside,
            "arguments": None,
            "aliases": aliases,
        }

    def unseen(self) -> None:
        """Nothing."""

    def outcomes(self, frame: Frame) -> list[TestOutcome]:
        """See ProgramTest."""
        values, failure = _values(frame, len(self.inside))
        if failure is not None:
            return [failure]
        named = {f"value{number}": value for number, value in enumerate(values)}
        try:
            if evaluate(self.outside, named):
                return [TestOutcome(True)]
        except Exception as error:  # noqa: BLE001 - the comparison of any two values can raise anything
            return [TestOutcome(False, f"{type(error).__name__} when comparing {shown(values)}")]
        return [TestOutcome(False, f"{self._expected()}got {', '.join(map(shown, values))}")]

    def _expected(self) -> str:
        compared = self.outside
        if isinstance(compared, ast.Compare) and isinstance(compared.ops[0], ast.Eq) and len(compared.ops) == 1:
            for side in (compared.comparators[0], compared.left):
                if not any(isinstance(node, ast.Name) and node.id.startswith("value") for node in ast.walk(side)):
                    return f"expected {shown(evaluate(side, {}))}, "
        return f"{ast.unparse(compared)[:80]!a} is false: "


@dataclass(frozen=True)
class CallTest:
    """A call of a function, or of a method of the class Solution, with plain arguments."""

    function: str
    arguments: list[Any]
    expected: tuple[Any, ...]
    """Each of them is right."""
    count: int = 1

    def case(self) -> dict[str, Any]:
        """See ProgramTest."""
        called = f"(Solution().{self.function} if 'Solution' in globals() else {self.function})(*arguments)"
        arguments = encode(self.arguments)
        described = {"kind": "values", "setup": "", "expressions": [called], "arguments": arguments, "aliases": {}}
        return described | {"room": _room(repr(self.expected))}

    def unseen(self) -> None:
        """Nothing."""

    def outcomes(self, frame: Frame) -> list[TestOutcome]:
        """See ProgramTest."""
        values, failure = _values(frame, 1)
        if failure is not None:
            return [failure]
        if any(same_value(expected, values[0]) for expected in self.expected):
            return [TestOutcome(True)]
        return [TestOutcome(False, f"expected {shown(self.expected[0])}, got {shown(values[0])}")]


@dataclass(frozen=True)
class CheckedTest:
    """Test code that runs as a whole, in the checker's process. `pieces`: statements, and whether each is a test.

    `names`: a name in the test code -> the program's.
    """

    pieces: tuple[tuple[str, bool], ...]
    names: Mapping[str, str]

    @property
    def count(self) -> int:
        """The statements that are tests."""
        return sum(counts for _, counts in self.pieces)

    def case(self) -> dict[str, Any]:
        """See ProgramTest."""
        return {"kind": "checked", "setup": "", "names": sorted(set(self.names.values())), "aliases": {}}

    def unseen(self) -> dict[str, Any]:
        """See ProgramTest."""
        return {"pieces": self.pieces, "names": dict(self.names)}

    def outcomes(self, frame: Frame) -> list[TestOutcome]:
        """See ProgramTest. Raises UnusableTestError."""
        found: list[TestOutcome] = []
        for line in frame["checks"].splitlines():
            report = loads(line)
            if "unusable" in report:
                raise UnusableTestError(report["unusable"])
            why = ": ".join(filter(None, report["why"] or []))
            found.append(TestOutcome(report["passed"], shown(why) if why else ""))
        missing = TestOutcome(False, f"the program's process ended{_last_line(frame['stderr'])}")
        return [*found, *[missing] * (self.count - len(found))]


@dataclass(frozen=True)
class ProgramTask:
    """What a program must do. `before` runs first, in the program's module.

    `prompt` ends inside of the function `entry_point`, which a response may define or continue; '' for a whole program.
    """

    tests: tuple[ProgramTest, ...]
    before: str = ""
    prompt: str = ""
    entry_point: str = ""

    @property
    def count(self) -> int:
        """The number of tests."""
        return sum(test.count for test in self.tests)

    def program(self, response: str) -> str:
        """The whole program of a response's code."""
        return completed(response, self.prompt, self.entry_point) if self.prompt else response

    def trusted_helpers(self) -> str:
        """What the prompt defines before the function."""
        return before_definition(self.prompt, self.entry_point)


def _room(expected: str) -> int:
    """Bytes of output beyond the limit that a test with a long output needs; rounded, so that it says little."""
    return 0 if len(expected) < ROOM_BYTES // 4 else (2 * len(expected) // ROOM_BYTES + 1) * ROOM_BYTES


def ended(status: int | None) -> str:
    """How a process ended."""
    if status is None:
        return "the program was ended"
    return f"exited with status {status}" if status >= 0 else f"was killed by signal {-status}"


def _values(frame: Frame, count: int) -> tuple[list[object], TestOutcome | None]:
    lines = frame["result"].splitlines()
    values = []
    try:
        for line in lines:
            written = loads(line)
            if isinstance(written, dict):
                kind, text = written["raised"]
                return [], TestOutcome(False, f"raised {shown(f'{kind}: {text}')}")
            [value] = written
            values.append(decode(value))
    except (NotPlainError, ValueError, TypeError, KeyError):
        return [], TestOutcome(False, "the program wrote into its results")
    if len(values) != count:
        return [], TestOutcome(
            False, f"{ended(frame['status'])} before it returned a value{_last_line(frame['stderr'])}"
        )
    return values, None


def _last_line(stderr: str) -> str:
    lines = stderr.strip().splitlines()
    return f": {shown(lines[-1])}" if lines else ""
