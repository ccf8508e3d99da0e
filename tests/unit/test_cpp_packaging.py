"""What the C++ client's build says about itself agrees with the rest of the project."""

import re
import tomllib
from pathlib import Path

import cpp_worker

ROOT = Path(__file__).parents[2]
CPP = ROOT / "clients" / "cpp"


def test_the_library_has_the_projects_version() -> None:
    """A session's client_version would be wrong otherwise."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert re.findall(r"VERSION (\d+\.\d+\.\d+) LANGUAGES", (CPP / "CMakeLists.txt").read_text()) == [version]


def test_every_package_that_is_looked_for_is_listed() -> None:
    """`.ci/run` and the README install the list; a skip names its packages."""
    looked_for = {*cpp_worker.PROGRAMS.values(), *cpp_worker.HEADERS.values()}
    assert sorted(looked_for) == (CPP / "apt-packages.txt").read_text().split()


def test_every_source_is_built() -> None:
    """A file that CMake does not name is compiled by nobody."""
    named = set(re.findall(r"src/\w+\.cpp", (CPP / "CMakeLists.txt").read_text()))
    assert named == {f"src/{source.name}" for source in (CPP / "src").glob("*.cpp")}
