"""Only deploy.hosting.ray_internals uses Ray's private API, and it names the pinned release of Ray."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ALLOWED = ROOT / "deploy/hosting/ray_internals.py"
PACKAGES = ("services", "rollout", "verifier", "learner", "deploy")
OWN_OBJECTS = ("self", "cls", "stack", "os")
"""Names whose private attributes are not Ray's: our own objects, and `os._exit`."""


def private(name: str) -> bool:
    """Whether a name is private; double underscores at both ends are not."""
    return name.startswith("_") and not name.endswith("__")


def uses(text: str) -> Iterator[str]:
    """The uses of Ray's private API in a source text: imports, and if it imports ray, any private access."""
    tree = ast.parse(text)
    imported = [name for node in ast.walk(tree) for name in ray_imports(node)]
    yield from (name for name in imported if "core.generated" in name or any(map(private, name.split("."))))
    for node in ast.walk(tree) if imported else ():
        if isinstance(node, ast.Call):
            yield from (f"{keyword.arg}=" for keyword in node.keywords if keyword.arg and private(keyword.arg))
        if isinstance(node, ast.Attribute) and private(node.attr) and not own(node.value):
            yield f".{node.attr}"


def own(node: ast.expr) -> bool:
    """Whether the node names an object whose private attributes are not Ray's."""
    return isinstance(node, ast.Name) and node.id in OWN_OBJECTS


def ray_imports(node: ast.AST) -> list[str]:
    """The dotted names that a statement imports from ray."""
    names: list[str] = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and node.module:
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    return [name for name in names if name.partition(".")[0] == "ray"]


def test_only_one_module_uses_rays_private_api() -> None:
    found = {
        str(path.relative_to(ROOT)): list(uses(path.read_text()))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
    }
    assert [name for name, private_uses in found.items() if private_uses] == [str(ALLOWED.relative_to(ROOT))]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("from ray._private.state import actors", "ray._private.state.actors"),
        ("def f():\n    import ray.serve._private.common", "ray.serve._private.common"),
        ("from ray.serve.context import _get_global_client", "ray.serve.context._get_global_client"),
        ("import ray\nray.init(_temp_dir='/tmp')", "_temp_dir="),
        ("import ray\nkey = actor._actor_id", "._actor_id"),
        ("from ray.core.generated.autoscaler_pb2 import Reason", "ray.core.generated.autoscaler_pb2.Reason"),
    ],
)
def test_a_planted_private_use_is_found(text: str, found: str) -> None:
    assert list(uses(text)) == [found]


@pytest.mark.parametrize("text", ["import ray\nself._actor = ray.get_actor('a')", "import os\nos._exit(1)", "x._y"])
def test_public_use_is_allowed(text: str) -> None:
    assert list(uses(text)) == []


@pytest.mark.filterwarnings("ignore")
def test_the_pinned_ray_is_the_tested_one() -> None:
    from deploy.hosting import ray_internals

    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert f"ray[serve]=={ray_internals.TRIED_WITH}" in dependencies
    assert f"Ray {ray_internals.TRIED_WITH}" in str(ray_internals.__doc__)
