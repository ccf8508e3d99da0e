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
        while (done := sequence.commit(40)).pending:
            pass
        return done.committed_tokens

print(run_worker("restarted", Layout.attention("toy@1", 2, 2, 8, DataType.FLOAT32, block_tokens=16), serve))
"""


STEPS = """
import sys
from kvharbor.gpumem import DataType, Layout

def step(pool, sequence, tokens):
    end = min(sequence.computed_tokens + 16, len(tokens))
    print("at", end, flush=True)
    if sys.stdin.readline() == "until lost\\n":
        while not sequence.ended:
            pass
    pool.views.numpy("k", 0)[sequence.table] = 1
    return end

layout = Layout.attention("toy@1", 2, 2, 8, DataType.FLOAT32, block_tokens=16)
serve("stepping", layout, [list(range(40))], step)
"""


def test_the_worker_goes_on_through_a_restart_and_into_the_next_epoch(start_fresh: StartService) -> None:
    """The process is killed in one step, the whole service in the next: the request begins again only for that."""
    service = start_fresh()
    worker = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", f"{EXAMPLES[2]}{STEPS}"],
        env={"KVHARBOR_SOCKET": service.target, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        assert worker.stdout.readline() == "at 16\n"
        service.restart_child()
        worker.stdin.write("\n")
        worker.stdin.flush()
        assert worker.stdout.readline() == "at 32\n"
        service.kill()
        start_fresh(socket=service.socket)
        said, _ = worker.communicate("until lost\n\n\n\n", timeout=30)
    assert worker.returncode == 0
    # Who is first, the thread that has been waiting for the lock or the commit, is nobody's to say.
    assert sorted(line.split()[0] for line in said.splitlines()[:2]) == ["again:", "epoch"]
    assert said.splitlines()[2:] == ["at 16", "at 32", "at 40"]


def test_ranks_of_an_engine_write_each_its_part(shared_service: ServiceProcess) -> None:
    """As the example says it, the ranks in threads of the process that runs it; the next engine finds both parts."""
    example = f"""{EXAMPLES[4]}
import threading

def start_rank(join_token, pool_id, table):
    written = threading.Event()

    def serve(views):
        views.numpy("k", 0)[table] = 2
        written.set()
        done.wait()

    ranks.append(threading.Thread(target=follow, args=(join_token, pool_id, 1, serve)))
    ranks[0].start()
    return written.wait

def write(views, table):
    views.numpy("k", 0)[table] = 1

done, ranks = threading.Event(), []
print(lead("ranks", [7] * 32, start_rank, write))
done.set()
ranks[0].join()
for part in range(RANKS):
    with connect() as harbor:
        pool = harbor.open_pool("ranks", LAYOUT, part=part)
        with pool.allocate([7] * 33) as sequence:
            print(sequence.cached_tokens, (pool.views.numpy("k", 0)[sequence.table[:2]] == part + 1).all())
"""
    assert run(example, shared_service.target) == "32\n32 True\n32 True\n"


def test_an_engine_of_two_streams_says_what_to_wait_for(shared_service: ServiceProcess) -> None:
    """The order of the example, with streams that write down what is asked of them: events first, then the wait."""
    example = f"""{EXAMPLES[5]}
from kvharbor.client import connect
from kvharbor.gpumem import DataType, Layout

class Stream:
    def __init__(self, name):
        self.name = name

    def record_event(self):
        print("record", self.name)
        return self

    def synchronize(self):
        print("synchronize", self.name)

layout = Layout.attention("toy@1", 2, 2, 8, DataType.FLOAT32, block_tokens=16)
with connect() as harbor:
    pool = open_on_two_streams(harbor, "streams", layout, Stream("computing"), Stream("reading"))
    sequence = pool.allocate(range(16))
    sequence.commit(16)
    sequence.release()
    print("released")
    harbor.drop_pool("streams")
"""
    said = run(example, shared_service.target).splitlines()
    assert said[: said.index("released")] == [
        "record computing",
        "synchronize computing",
        "record computing",
        "record reading",
        "synchronize computing",
        "synchronize reading",
    ]


def test_the_worker_goes_on_after_a_restart_of_the_service(start_fresh: StartService) -> None:
    """Killed under a request, gone for a while and started again: the worker connects and computes it anew."""
    service = start_fresh()
    worker = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", f"{EXAMPLES[3]}{RESTARTED}"],
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
    example = f"""{EXAMPLES[6]}
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


def test_an_engine_with_tables_of_its_own_holds_blocks(shared_service: ServiceProcess) -> None:
    """Two prompts of the example: the second one finds what the first has published; afterwards all is cached."""
    example = f"""{EXAMPLES[7]}
import hashlib
from kvharbor.client import connect
from kvharbor.gpumem import DataType, Layout

layout = Layout.attention("toy@1", 2, 2, 8, DataType.FLOAT32, block_tokens=16)
keys = [hashlib.sha256(bytes([number])).digest() for number in range(3)]
with connect() as harbor:
    pool = harbor.open_pool("own-tables", layout, size="1MiB")
    for count in (2, 3):
        got = admit(pool, keys[:count], 4, lambda held, leased: print(len(held), len(leased)))
        finish(pool, got)
        pool.blocks.flush()
    print(is_worth_asking(pool, 4), pool.stats().cached_block_count, pool.stats().reserved_block_count)
"""
    assert run(example, shared_service.target) == "0 4\n2 2\nTrue 3 0\n"


def test_a_batch_decodes_without_a_call(shared_service: ServiceProcess) -> None:
    """As the example says it: what it leaves is whole blocks of prompt and new tokens."""
    example = f"""{EXAMPLES[8]}
from kvharbor.client import connect
from kvharbor.gpumem import DataType, Layout

def forward(slots, tables):
    for layer in range(2):
        pool.views.numpy("k", layer)[slots] = 1
    return [7] * len(tables)

layout = Layout.attention("toy@1", 2, 2, 8, DataType.FLOAT32, block_tokens=16)
with connect() as harbor:
    pool = harbor.open_pool("decoding", layout, size="1MiB")
    sequences = [pool.allocate([number] * 10) for number in range(4)]
    for sequence in sequences:
        sequence.commit(10)
    decode(pool, sequences, forward, [7] * 4, step_count=40)
    pool.blocks.flush()
    print(pool.lookup([2] * 10 + [7] * 38).present_tokens, pool.stats().sequence_count)
"""
    assert run(example, shared_service.target) == "48 0\n"
