"""The examples of the client's README run as they stand."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import StartService
from kvharbor import client
from service_process import ServiceProcess

pytestmark = pytest.mark.slow
README = Path(client.__file__).parents[2] / "README.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def run(example: str, socket: str) -> str:
    # Without torch: the examples promise to need numpy alone.
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"import sys\nsys.modules['torch'] = None\n{example}"],
        env={"KVHARBOR_SOCKET": socket, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stderr, done.returncode) == ("", 0)
    return done.stdout


def test_the_worker_reuses_its_prompt_and_answers_the_same(shared_service: ServiceProcess) -> None:
    """The second answer reuses the prompt's whole blocks and has the same tokens."""
    first, second = run(EXAMPLES[0], shared_service.target).splitlines()
    assert first.startswith("100 prompt tokens, 0 reused: [")
    assert second.startswith("100 prompt tokens, 96 reused: [")
    answers = [line.partition(": ")[2] for line in (first, second)]
    assert answers[0] == answers[1]
    assert len(set(re.findall(r"\d+", answers[0]))) > 1


def test_the_worker_fits_on_one_screen() -> None:
    """What a newcomer has to read stays short."""
    assert len(EXAMPLES[0].splitlines()) <= 60


def test_the_asyncio_example_serves_its_prompts(shared_service: ServiceProcess) -> None:
    """Eight prompts of 64 tokens, all committed."""
    assert run(EXAMPLES[1], shared_service.target) == f"{[64] * 8}\n"


RESTARTED = """
import sys
from kvharbor.gpumem import DataType, Layout

def serve(pool):
    with pool.allocate(range(40)) as sequence:
        print("serving", flush=True)
        sys.stdin.readline()
        return sequence.commit(40).committed_tokens

print(run_worker("restarted", Layout.attention("toy@1", 2, 2, 8, DataType.FLOAT32, block_tokens=16), serve))
"""


def test_the_worker_goes_on_after_a_restart_of_the_service(start_fresh: StartService) -> None:
    """Killed under a request, gone for a while and started again: the worker connects and computes it anew."""
    service = start_fresh()
    worker = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", f"{EXAMPLES[2]}{RESTARTED}"],
        env={"KVHARBOR_SOCKET": service.target, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        assert worker.stdout.readline() == "serving\n"
        service.kill()
        worker.stdin.write("\n")
        worker.stdin.flush()
        assert "connect again" in worker.stdout.readline()
        assert "no kvharbor service answers" in worker.stdout.readline()
        start_fresh(socket=service.socket)
        said, _ = worker.communicate("\n", timeout=30)
    assert said.splitlines()[-2:] == ["serving", "32"]
    assert worker.returncode == 0


def test_the_warm_worker_makes_an_ordered_prefix_whole(shared_service: ServiceProcess) -> None:
    """It computes what is missing, commits it and ends when there is no more to do."""
    example = f"""{EXAMPLES[3]}
from kvharbor.gpumem import DataType, Layout

layout = Layout.attention("toy@1", 2, 2, 8, DataType.FLOAT32, block_tokens=16)
with connect() as operator:
    pool = operator.open_pool("warm-readme", layout, size="1MiB")
    pool.warmup_by_engine(range(64), "w")
    compute_warm_tasks("warm-readme", layout, lambda pool, sequence, tokens, first: print(len(tokens), first))
    print(pool.warmup_by_engine(range(64), "w").pinned_tokens)
    pool.unwarm("w")
"""
    assert run(example, shared_service.target) == "64 0\n64\n"
