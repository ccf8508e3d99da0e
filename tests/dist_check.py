"""`make dist-check`: sdist, wheel from the sdist, an empty environment, and the tests of it outside the tree.

Proves that what is published works without the checkout: a file that only the checkout has would be missing here.
"""

import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
# The oldest that pyproject.toml admits: engines hold protobuf back, and generated code refuses an older runtime.
OLDEST = ("grpcio==1.71.2", "grpcio-status==1.71.2", "protobuf==5.29.6")
TESTS = ("unit/test_client_address.py", "unit/test_client_errors.py", "unit/test_gpumem_layout.py")


def main() -> None:
    """Builds, installs and tests; any failure ends it with a non-zero exit."""
    with tempfile.TemporaryDirectory(prefix="kvharbor-dist-") as folder:
        work = Path(folder)
        _run(sys.executable, "-m", "build", "--no-isolation", "--outdir", work / "dist", ROOT)
        (wheel,) = (work / "dist").glob("*.whl")
        venv.create(work / "venv", with_pip=True)
        python = work / "venv" / "bin" / "python"
        # A client's installation: no extras, so that a missing requirement of the client shows.
        _run(python, "-m", "pip", "install", "--quiet", wheel, "pytest", "pytest-timeout", "hypothesis")
        shutil.copytree(ROOT / "tests", work / "tests")
        shutil.copy(ROOT / "pyproject.toml", work / "pyproject.toml")
        _test_client(python, work)
        _run(python, "-m", "pip", "install", "--quiet", *OLDEST)
        _test_client(python, work)
        _run(python, "-m", "pip", "install", "--quiet", "--upgrade", f"kvharbor[server] @ {wheel.as_uri()}")
        _run(work / "venv" / "bin" / "kvharbor", "--help")


def _test_client(python: Path, work: Path) -> None:
    _run(python, "-c", "import kvharbor.client, kvharbor.client.aio, kvharbor.gpumem, kvharbor.v1.side_pb2")
    tests = [work / "tests" / test for test in TESTS]
    _run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, cwd=work)


def _run(*command: object, cwd: Path | None = None) -> None:
    subprocess.run([str(part) for part in command], check=True, cwd=cwd)


if __name__ == "__main__":
    main()
