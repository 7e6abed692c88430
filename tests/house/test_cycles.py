"""No cycle of imports between our modules or packages; imports inside functions and for type checking count as well.

import-linter checks the packages on each level; a cycle between a package and its own modules is found only here.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.house.cycles import import_cycles

ROOT = Path(__file__).resolve().parents[2]
CONTRACT = "No cycle of imports"


def linter_settings() -> dict[str, Any]:
    """import-linter's settings in pyproject.toml."""
    settings: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    return settings


def test_our_packages_have_no_import_cycle() -> None:
    packages = linter_settings()["root_packages"]
    assert packages == ["services", "rollout", "verifier", "learner", "deploy", "penstock_client"]
    assert import_cycles(*packages) == []


def lazy(statement: str) -> str:
    """A function that imports."""
    return f"def work():\n    {statement}\n"


PLANTED = {
    "lazy, between modules": {"one": "import planted.two", "two": lazy("from planted import one")},
    "lazy on both sides": {"one": lazy("import planted.two"), "two": lazy("import planted.one")},
    "between packages, not modules": {
        "left/__init__": "",
        "left/a": lazy("import planted.right.b"),
        "left/c": "",
        "right/__init__": "",
        "right/b": "",
        "right/d": lazy("from planted.left import c"),
    },
    "for type checking": {
        "one": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import planted.two",
        "two": "import planted.one",
    },
}


@pytest.fixture
def plant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the import path with an empty package `planted`."""
    (tmp_path / "planted").mkdir()
    (tmp_path / "planted/__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "planted"]:
        del sys.modules[name]


def write(folder: Path, modules: dict[str, str]) -> None:
    """Write the modules of the package `planted`."""
    for name, text in modules.items():
        path = folder / "planted" / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize("modules", PLANTED.values(), ids=PLANTED)
def test_a_planted_cycle_is_found(plant: Path, modules: dict[str, str]) -> None:
    write(plant, modules)
    [found] = import_cycles("planted")[:1]
    assert found[0] == found[-1]
    assert all(name.startswith("planted.") for name in found)


def test_a_package_that_its_module_imports_is_found(plant: Path) -> None:
    (plant / "planted/__init__.py").write_text("from planted.one import work")
    write(plant, {"one": lazy("import planted")})
    assert sorted(import_cycles("planted")[0][1:]) == ["planted", "planted.one"]


def test_a_shared_import_is_no_cycle(plant: Path) -> None:
    write(plant, {"one": "import planted.base", "two": lazy("import planted.base"), "base": ""})
    assert import_cycles("planted") == []


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    """Check the package `planted` with our contract against cycles."""
    [contract] = [contract for contract in linter_settings()["contracts"] if contract["name"] == CONTRACT]
    config = folder / "linter.toml"
    config.write_text(
        '[tool.importlinter]\nroot_packages = ["planted"]\n[[tool.importlinter.contracts]]\n'
        f'name = "{CONTRACT}"\ntype = "{contract["type"]}"\nancestors = ["planted"]\n'
    )
    command = [Path(sys.executable).with_name("lint-imports"), "--config", str(config), "--no-cache"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("modules", PLANTED.values(), ids=PLANTED)
def test_the_linter_rejects_a_planted_cycle(plant: Path, modules: dict[str, str]) -> None:
    write(plant, modules)
    checked = lint(plant)
    assert checked.returncode == 1, checked.stdout + checked.stderr
    assert f"{CONTRACT} BROKEN" in checked.stdout


def test_the_linter_accepts_a_shared_import(plant: Path) -> None:
    write(plant, {"one": "import planted.base", "base": ""})
    checked = lint(plant)
    assert checked.returncode == 0, checked.stdout + checked.stderr
