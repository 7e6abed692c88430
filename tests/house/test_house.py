"""The code keeps its structure: small folders, files, classes and functions; documented, typed, formatted."""

from __future__ import annotations

import ast
from collections import Counter

from tests.house.figures import (
    PACKAGES,
    definitions,
    entries_per_folder,
    lines_of,
    python_files,
    signatures,
    tracked,
    unformatted,
)

ENTRIES, FILE_LINES, CLASS_LINES, FUNCTION_LINES, NAME_LENGTH = 13, 400, 250, 50, 60
DOCUMENTED = 0.93
UNFORMATTED = 20


def test_no_folder_is_crowded() -> None:
    folders = entries_per_folder([path for path in tracked() if not path.startswith("tests/")])
    assert {folder: count for folder, count in folders.items() if count > ENTRIES} == {}


def test_files_classes_and_functions_are_small() -> None:
    product = list(python_files(*PACKAGES, "benchmarks"))
    assert [file for file in product if lines_of(file) > FILE_LINES] == []
    assert [found for found in definitions(product, ast.ClassDef) if found.lines > CLASS_LINES] == []
    functions = definitions(product, ast.FunctionDef, ast.AsyncFunctionDef)
    assert [found for found in functions if found.lines > FUNCTION_LINES] == []


def test_no_two_classes_have_the_same_name() -> None:
    counts = Counter(found.name for found in definitions(python_files(*PACKAGES), ast.ClassDef))
    assert [name for name, count in counts.items() if count > 1] == []


def test_public_functions_are_typed_and_documented() -> None:
    public = list(signatures(python_files(*PACKAGES)))
    assert [found for found in public if not found.typed] == []
    assert sum(found.documented for found in public) >= DOCUMENTED * len(public)


def test_the_formatter_is_rarely_switched_off() -> None:
    assert unformatted() < UNFORMATTED


def test_names_of_tests_are_short() -> None:
    functions = definitions(python_files("tests"), ast.FunctionDef, ast.AsyncFunctionDef)
    long = [found for found in functions if found.name.startswith("test_") and len(found.name) > NAME_LENGTH]
    assert long == []
