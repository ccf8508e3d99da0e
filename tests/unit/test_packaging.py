"""What keeps four source roots one namespace package (docs/decisions/0006)."""

import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE_ROOTS = ("proto", "gpumem", "service", "clients/python")


@pytest.mark.parametrize("root", SOURCE_ROOTS)
def test_no_source_root_closes_the_namespace(root: str) -> None:
    """A stray kvharbor/__init__.py in one root would hide the packages of all the others."""
    assert not (ROOT / root / "kvharbor" / "__init__.py").exists()


@pytest.mark.parametrize("root", SOURCE_ROOTS)
def test_a_source_root_holds_no_loose_modules(root: str) -> None:
    """A module beside the namespace would be importable in a checkout and missing from the wheel."""
    assert list((ROOT / root).glob("*.py")) == []


@pytest.mark.parametrize("root", SOURCE_ROOTS)
def test_every_part_is_typed_and_has_a_readme(root: str) -> None:
    """Type checkers of users follow a part only with its py.typed; generated code has its own .pyi files."""
    assert (ROOT / root / "README.md").exists()
    for part in (ROOT / root / "kvharbor").iterdir():
        if part.name not in ("v1", "__pycache__"):
            assert (part / "py.typed").exists(), part


def test_a_client_installs_light() -> None:
    """Engines hold their environments tight: the base requirements are what a client needs, and no more."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {requirement.split(">")[0].split("=")[0] for requirement in project["dependencies"]}
    assert names == {"grpcio", "grpcio-status", "googleapis-common-protos", "protobuf", "numpy"}


def test_torch_is_locked_exactly() -> None:
    """A range brings a CUDA build of several gigabytes."""
    locked = (ROOT / "requirements.lock").read_text().splitlines()
    assert [line for line in locked if line.startswith("torch==")] == ["torch==2.13.0"]
