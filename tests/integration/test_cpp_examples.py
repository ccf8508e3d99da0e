"""What the README of the C++ client shows works as it stands: the examples, and a project that takes the library in."""

import re
import subprocess
from pathlib import Path

import pytest

from cpp_worker import ROOT, require_build
from kvharbor.client import connect
from kvharbor.gpumem import DataType, Layout
from service_process import ServiceProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
CPP = ROOT / "clients" / "cpp"
README = (CPP / "README.md").read_text()


def test_the_example_reuses_its_prompt(shared_service: ServiceProcess) -> None:
    """It says so itself when bytes are wrong."""
    for reused in (0, 96):
        done = subprocess.run(
            [require_build() / "kvharbor_example", str(shared_service.socket)],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert (done.stderr, done.returncode) == ("", 0)
        assert done.stdout.splitlines() == [
            f"103 tokens, {reused} reused and right",
            "103 tokens, 96 reused and right",
        ]


@pytest.mark.parametrize("example", sorted((CPP / "examples").iterdir()), ids=lambda example: example.stem)
def test_the_readme_shows_every_example(example: Path) -> None:
    """What is shown is what is compiled and run."""
    assert example.read_text() in README


def test_the_example_of_two_ranks_writes_both_parts(shared_service: ServiceProcess) -> None:
    """Each its own, by its rank, and what the leader commits is found."""
    program, socket = require_build() / "kvharbor_ranks", str(shared_service.socket)
    leader = subprocess.Popen(
        [program, socket, "0"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    rank = subprocess.Popen([program, socket, "1"], stdin=leader.stdout, stdout=leader.stdin)
    with leader, rank:
        assert leader.stdin is not None
        assert leader.stdout is not None
        leader.stdout.close()
        leader.stdin.close()
        assert leader.stderr is not None
        assert leader.stderr.read() == "32 tokens committed\n"
        assert (leader.wait(30), rank.wait(30)) == (0, 0)
    layout = Layout.attention("toy-tp@1", 2, 2, 8, DataType.FLOAT32, block_tokens=16, tp_size=2)
    with connect(shared_service.target) as first:
        pool = first.open_pool("toy-tp", layout)
        with pool.allocate([7] * 33) as held, connect(shared_service.target, join=first.join_token, rank=1) as second:
            assert held.cached_tokens == 32
            for views, number in ((pool.views, 1.0), (second.attach_pool(pool.id).views, 2.0)):
                assert (views.numpy("v", 1)[held.table[:2]] == number).all()


def test_a_project_elsewhere_takes_the_library_in(tmp_path: Path) -> None:
    """Without its examples and tests. It is not compiled here: that is the work of a minute."""
    require_build()
    (project,) = re.findall(r"```cmake\n(.*?)```", README, re.DOTALL)
    (tmp_path / "CMakeLists.txt").write_text(project)
    (tmp_path / "main.cpp").write_text("#include <kvharbor/harbor.hpp>\nint main() {}\n")
    built = tmp_path / "build"
    run("cmake", "-S", tmp_path, "-B", built, f"-DKVHARBOR_SOURCE={ROOT}")
    targets = re.findall(r"^\.\.\. (\w+)$", run("cmake", "--build", built, "--target", "help"), re.MULTILINE)
    assert {"kvharbor", "my_engine"} <= set(targets)
    assert not {"kvharbor_example", "kvharbor_ranks", "kvharbor_driven_worker"} & set(targets)
    assert "-O3" in (built / "CMakeFiles" / "my_engine.dir" / "flags.make").read_text()


def run(*command: object) -> str:
    """Returns what a command has said."""
    words = [str(word) for word in command]
    return subprocess.run(words, check=True, capture_output=True, text=True, timeout=120).stdout
