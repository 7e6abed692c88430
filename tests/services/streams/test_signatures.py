"""Calls of Redis functions pass each value by the name that the Lua source declares; any other name is rejected."""

import ast
import importlib
from pathlib import Path

import pytest

import services.streams
from services.streams.connection import functions as function_library
from services.streams.connection.functions import call, library
from services.streams.connection.signatures import SignatureError, parse_signature
from services.streams.keys import RunKeys
from services.streams.state import ownership
from services.streams.state.ownership import RoleOwner

ROOT = Path(services.streams.__file__).parents[2]
OWNERSHIP = Path(ownership.__file__)
SOURCE = """\
-- Rename a group.
local group_key, payload_keys = unpack(keys)
local name,
  index_list, text_list = unpack(args)

return 1
"""
VALUES = {"group_key": "g", "payload_keys": ["p", "q"], "name": "n", "index_list": (1, 2, 3), "text_list": []}

CALLS = {"call", "call_alone", "call_for_each"}
OWNER_CALL, OWNER_NAMES = "_call", ["epoch_key", "fence"]
"""RoleOwner's call, and the names that it adds to those of its caller."""


def imports_from(tree, module):
    """The names that a source imports from a module."""
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == module]
    return {name.name for node in imports for name in node.names}


def names_of(keywords, path):
    """The names of the values of a call; `**TABLE` counts as the names in the module's table."""
    for keyword in keywords:
        if keyword.arg is None and isinstance(keyword.value, ast.Name) and keyword.value.id.isupper():
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            yield from getattr(importlib.import_module(module), keyword.value.id)
        else:
            yield keyword.arg


def python_calls():
    """Every call of a Redis function in the product: its file and line, the function, the names of all values."""
    for package in ("services", "rollout", "verifier", "learner", "deploy"):
        for path in (ROOT / package).rglob("*.py"):
            tree = ast.parse(path.read_text())
            direct = imports_from(tree, call.__module__) & CALLS
            of_owner = {OWNER_CALL} if "RoleOwner" in imports_from(tree, RoleOwner.__module__) else set()
            for node in ast.walk(tree):
                if not isinstance(node, ast.Call):
                    continue
                place, names = f"{path.name}:{node.lineno}", list(names_of(node.keywords, path))
                if isinstance(node.func, ast.Name) and node.func.id in direct:
                    if path == OWNERSHIP and None in names:
                        continue  # RoleOwner's call passes on what its callers give it
                    assert len(node.args) == 2, f"{place} passes more than the function's name by position"
                    yield place, ast.literal_eval(node.args[1]), names
                elif isinstance(node.func, ast.Attribute) and node.func.attr in of_owner:
                    assert len(node.args) == 1, f"{place} passes more than the function's name by position"
                    yield place, ast.literal_eval(node.args[0]), names + OWNER_NAMES


def test_python_passes_exactly_the_declared_names():
    called = set()
    for place, function, names in python_calls():
        assert sorted(names) == sorted(library().signatures[function].names), place
        called.add(function)
    assert called == set(library().signatures), "every function has a caller"


def test_every_source_starts_with_a_comment():
    for name, source in function_library._sources()[1].items():
        assert source.startswith("-- "), name


def test_order_is_that_of_the_source():
    keys, args = parse_signature("rename", SOURCE).order(VALUES)
    assert keys == ["g", "p", "q"]
    assert args == [2, 3, 0, "n", 1, 2, 3], "the sizes of the lists, single values, the lists' elements"
    swapped = SOURCE.replace("name,\n  index_list, text_list", "name, text_list, index_list")
    assert parse_signature("rename", swapped).order(VALUES)[1] == [2, 0, 3, "n", 1, 2, 3], "Python needs no change"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({name: value for name, value in VALUES.items() if name != "name"}, "name is missing"),
        (VALUES | {"size": 1}, "size is unknown"),
        ({**VALUES, "nmae": VALUES["name"]}, "nmae is unknown"),
        (VALUES | {"name": ["n"]}, "name: expected a single value"),
        (VALUES | {"name": None}, "name: expected a single value"),
        (VALUES | {"payload_keys": "p"}, "payload_keys: expected a list"),
    ],
    ids=["dropped", "added", "misspelled", "list", "none", "single"],
)
def test_other_names_and_kinds_are_rejected(values, message):
    with pytest.raises(SignatureError, match=f"Redis function rename: .*{message}"):
        parse_signature("rename", SOURCE).order(values)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("group_key,", "group,", "ends in neither _key nor _keys"),
        ("group_key, payload_keys", "payload_keys, group_key", "group_key follows a list"),
        ("index_list, text_list", "index_list, text", "text follows a list"),
        ("text_list", "index_list", "index_list is declared twice"),
        ("return 1", "return args[1]", "body uses `keys` or `args`"),
        ("unpack(keys)", "{keys[1], keys[2]}", "expected comments, then"),
    ],
)
def test_a_source_with_another_header_is_rejected(old, new, message):
    with pytest.raises(SignatureError, match=message):
        parse_signature("rename", SOURCE.replace(old, new))


async def test_a_rejected_call_does_not_reach_redis(redis, run_id):
    keys = RunKeys(run_id)
    with pytest.raises(SignatureError, match="epoch is unknown; it declares epoch_key, owner"):
        await call(redis, "become_owner", epoch_key=keys.epoch("sampler"), owner="s", epoch=1)
    with pytest.raises(SignatureError, match="epoch_key is missing"):
        await call(redis, "become_owner")
    with pytest.raises(SignatureError, match="'become_onwer' does not exist"):
        await call(redis, "become_onwer", epoch_key=keys.epoch("sampler"))
    assert await redis.get(keys.epoch("sampler")) is None


async def test_lists_arrive_as_lua_tables(own_server, monkeypatch):
    _, client = own_server
    check = "return (group_key == 'g' and payload_keys[2] == 'q' and #index_list == 3 and #text_list == 0) and 7 or 0\n"
    shared = function_library._sources()[0]
    monkeypatch.setattr(function_library, "_sources", lambda: (shared, {"rename": SOURCE.replace("return 1\n", check)}))
    library.cache_clear()
    try:
        assert await call(client, "rename", **VALUES) == 7
    finally:
        monkeypatch.undo()
        library.cache_clear()
