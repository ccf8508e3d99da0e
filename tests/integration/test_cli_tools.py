"""The command line against a real service: what it prints, and how it ends."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from kvharbor.server.entry import SERVER_PACKAGES
from kvharbor.v1 import cache_service_pb2 as cache
from kvharbor.v1 import pool_service_pb2 as pools
from raw_caller import BLOCK_BYTES, RawCaller, tokens
from waiting import quickest, seconds

pytestmark = pytest.mark.slow
Run = Callable[..., "subprocess.CompletedProcess[str]"]
PROMPT = ",".join(str(token) for token in range(40))
NAME_IT = "start one with `kvharbor serve`, or name its socket with --socket or KVHARBOR_SOCKET\n"


@pytest.fixture
def run(harbor: str) -> Run:
    """Runs `kvharbor` with these arguments; KVHARBOR_SOCKET says where the service is."""

    def run_command(*arguments: str, stdin: bytes | None = None) -> "subprocess.CompletedProcess[str]":
        done = subprocess.run(
            [sys.executable, "-m", "kvharbor.server.cli", *arguments],
            input=stdin,
            capture_output=True,
            check=False,
            timeout=30,
            env={**os.environ, "KVHARBOR_SOCKET": harbor, "COLUMNS": "120"},
        )
        return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())

    return run_command


@pytest.fixture(scope="module")
def pool(shared_service: object) -> str:
    """A pool of the shared service with the first 32 tokens of the prompt."""
    with RawCaller(str(shared_service.socket)) as caller:  # type: ignore[attr-defined]
        pool_id = caller.open_pool("tools")
        request = cache.AllocateRequest(pool_id=pool_id, token_ids=tokens(*range(32)))
        sequence = caller.call(caller.cache.Allocate, request).sequence
        item = cache.CommitItem(sequence_id=sequence.sequence_id, computed_tokens=32)
        caller.call(caller.cache.Commit, cache.CommitRequest(pool_id=pool_id, items=[item]))
    return "tools"


def test_help_comes_at_once() -> None:
    """Neither gRPC nor numpy is loaded for it; half a second is what a shell user notices."""
    program = "import sys; from kvharbor.server import cli; print(*sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert {"grpc", "numpy", "torch", "pydantic", "rich.table"} & set(loaded.split()) == set()
    command = [sys.executable, "-m", "kvharbor.server.cli", "--help"]
    assert quickest(lambda: seconds(lambda: subprocess.run(command, capture_output=True, check=True)), 2) < 2


def test_the_version_is_shown(run: Run) -> None:
    """That of the installed package."""
    assert run("--version").stdout == f"kvharbor {metadata.version('kvharbor')}\n"


@pytest.mark.parametrize("package", ["typer", "pydantic"])
def test_without_the_packages_of_the_server_one_line_says_how_to_get_them(package: str) -> None:
    """A client's installation has the command too; some are needed at once, others by a command."""
    program = f"import sys; sys.modules[{package!r}] = None; from kvharbor.server.entry import main; main()"
    failed = subprocess.run([sys.executable, "-c", program, "serve"], capture_output=True, text=True, check=False)
    told = "kvharbor: the command line needs more packages: pip install 'kvharbor[server]'\n"
    assert (failed.returncode, failed.stdout, failed.stderr) == (2, "", told)


def test_the_packages_of_the_server_are_those_of_its_extra() -> None:
    """One that is added there is told of as missing too."""
    imported = {
        "grpcio-health-checking": "grpc_health",
        "grpcio-reflection": "grpc_reflection",
        "prometheus-client": "prometheus_client",
    }
    required = [line for line in metadata.requires("kvharbor") or () if re.search("extra == .server.", line)]
    names = {re.split("[^A-Za-z0-9-]", line)[0] for line in required}
    assert {imported.get(name, name) for name in names} == SERVER_PACKAGES


def test_lookup_takes_ids_text_and_raw_tokens(run: Run, pool: str, tmp_path: Path) -> None:
    """By argument, by file and by stdin: the same answer."""
    raw, text = tmp_path / "raw", tmp_path / "text"
    raw.write_bytes(tokens(*range(40)))
    text.write_text(PROMPT.replace(",", "\n"))
    answers = [
        run("lookup", pool, "--ids", PROMPT, "--json"),
        run("lookup", pool, "--ids", PROMPT.replace(",", " "), "--json"),
        run("lookup", pool, "--tokens", str(raw), "--json"),
        run("lookup", pool, "--tokens", str(text), "--json"),
        run("lookup", pool, "--tokens", "-", "--json", stdin=PROMPT.encode()),
    ]
    found = {"present_tokens": 32, "cached_tokens": 32, "miss": None}
    assert [json.loads(answer.stdout) for answer in answers] == [found] * 5


def test_a_namespace_is_part_of_the_question(run: Run, pool: str, tmp_path: Path) -> None:
    """Another salt, which is read from a file, finds nothing, and the answer says why [Y1]."""
    salt = tmp_path / "salt"
    salt.write_bytes(b"other")
    answer = run("lookup", pool, "--ids", PROMPT, "--salt-file", str(salt))
    told = "0 tokens present, 0 would be reused\nbehind token 0: there under another salt\n"
    assert answer.stdout == told


def test_a_prompt_that_cannot_be_shared_is_told(run: Run, pool: str) -> None:
    """It has no miss, as no block of it could be there."""
    told = "0 tokens present, 0 would be reused\nthe prompt is shorter than a block, and only whole blocks are shared\n"
    assert run("lookup", pool, "--ids", "1,2,3").stdout == told


def test_a_pin_is_made_and_ended(run: Run, pool: str) -> None:
    """Status 1 tells that something of the prefix is missing; an unknown pin is an error."""
    first = ",".join(str(token) for token in range(32))
    warmed = run("warm", pool, "system", "--ids", first, "--ttl-s", "60", "--json")
    shown = json.loads(warmed.stdout)
    assert (shown["pinned_tokens"], shown["missing_tokens"], shown["ttl_s"]) == (32, 0, 60.0)
    more = run("warm", pool, "more", "--present-only", "--ids", f"{PROMPT},{PROMPT}")
    assert (more.returncode, more.stdout) == (1, "32 tokens pinned as more, 48 missing\n")
    ended = run("unwarm", pool, "system")
    assert (ended.returncode, ended.stdout) == (0, f"pin system of pool {pool} of tenant uid-{os.getuid()} ended\n")
    assert run("unwarm", pool, "more").returncode == 0
    ended = run("unwarm", pool, "system")
    assert (ended.returncode, ended.stderr) == (1, "kvharbor: no warm pin is named 'system'; it may have expired\n")


def test_without_an_engine_the_task_waits_and_the_command_says_so(run: Run, pool: str) -> None:
    """It does not wait for what nobody would do; unwarm ends the task although nothing is pinned yet."""
    ordered = run("warm", pool, "cold", "--ids", ",".join(["9"] * 16), "--wait-s", "30")
    told = (
        "0 tokens pinned as cold, 16 missing: no attached engine accepts warm tasks; "
        "the task for the missing tokens waits for one\n"
    )
    assert (ordered.returncode, ordered.stdout) == (1, told)
    shown = json.loads(run("stats", "--json", pool).stdout)["pools"][0]
    assert (shown["warm_task_waiting_count"], shown["warm_task_filling_count"]) == (1, 0)
    assert "1 waiting, 0 filling" in run("stats", pool).stdout
    assert run("unwarm", pool, "cold").returncode == 0
    assert run("unwarm", pool, "cold").returncode == 1


def test_watch_prints_the_index_first(harbor: str, pool: str) -> None:
    """A line each, as JSON for programs."""
    command = [sys.executable, "-m", "kvharbor.server.cli", "watch", pool, "--json", "--socket", harbor]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        stored = json.loads(watching.stdout.readline())
        progress = json.loads(watching.stdout.readline())
        watching.terminate()
    assert len(stored["stored"]) == 2
    assert progress == {"revision": stored["revision"]}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("lookup", "none", "--ids", "1"), "no pool is named 'none': a worker has to open it first"),
        (("drop", "none"), "no pool is named 'none': a worker has to open it first"),
        (("stats", "none"), "no pool is named 'none': a worker has to open it first"),
        (("lookup", "tools", "--ids", "4294967296"), "token_ids[0]"),
        (("lookup", "tools", "--tokens", "/nonexistent"), "cannot read /nonexistent"),
        (("stats", "--socket", "/nonexistent/a.sock"), "no kvharbor service answers at /nonexistent/a.sock ("),
        (("stats", "--socket", "/nonexistent/a.sock"), NAME_IT),
        (("stats", "--socket", "localhost:1"), f"answers at localhost:1 (Connection refused): {NAME_IT}"),
        (("exec", "--socket", "/nonexistent/a.sock", "--pool", "p", "--", "true"), NAME_IT),
        (("health", "--socket", "/nonexistent/a.sock"), NAME_IT),
        (("exec", "--socket", "/nonexistent/a.sock", "--pool", "p", "--", "true"), "answers at /nonexistent/a.sock: "),
        (("exec", "--pool", "none", "--", "true"), "is named 'none': a worker has to open it first"),
        (("exec", "--pool", "tools", "--socket", "localhost:1", "--", "true"), "no side socket"),
    ],
)
def test_what_goes_wrong_is_one_line(run: Run, pool: str, arguments: tuple[str, ...], told: str) -> None:
    """On stderr, with status 1 and without a traceback."""
    failed = run(*arguments)
    assert (failed.returncode, failed.stdout, failed.stderr.count("\n")) == (1, "", 1)
    assert told in failed.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("warm", "tools", "w", "--ids", "1", "--present-only", "--wait-s", "1"), "nothing to wait for"),
        (("lookup", "tools"), "either --tokens or --ids"),
        (("lookup", "tools", "--ids", "1", "--tokens", "-"), "either --tokens or --ids"),
        (("lookup", "tools", "--ids", "1,two"), "--ids: 'two', number 2, is no token id"),
        (("lookup", "tools", "--tokens", "/dev/null"), "/dev/null has no token ids: write whole numbers"),
        (("warm", "tools", "w", "--ids", "/tmp/t.bin"), "--ids: '/tmp/t.bin', number 1, is no token id"),
        (("warm", "tools", "w", "--ids", "/tmp/t.bin"), "for a file use --tokens"),
    ],
)
def test_what_cannot_be_meant_has_the_status_of_usage(
    run: Run, pool: str, arguments: tuple[str, ...], told: str
) -> None:
    """That of an option that there is none of: 1 would mean that tokens are missing, or what the service says."""
    failed = run(*arguments)
    assert (failed.returncode, failed.stdout, failed.stderr.count("\n")) == (2, "", 1)
    assert told in failed.stderr
    assert run("lookup", "tools", "--id", "1").returncode == 2


@pytest.mark.parametrize(
    ("command", "status"), [("/nonexistent", 127), ("no-such-command", 127), ("/dev/null/x", 127), ("/etc/passwd", 126)]
)
def test_exec_ends_like_a_shell_when_it_cannot_run_the_command(run: Run, pool: str, command: str, status: int) -> None:
    """127: there is no such command; 126: it cannot be executed. Either is one line."""
    failed = run("exec", "--pool", pool, "--", command)
    assert (failed.returncode, failed.stdout, failed.stderr.count("\n")) == (status, "", 1)
    assert failed.stderr.startswith(f"kvharbor: cannot run {command}: ")


def test_drop_gives_a_pool_back_once_nobody_holds_it(run: Run, harbor: str) -> None:
    """Refused, it says what is in use."""
    with RawCaller(harbor) as caller:
        caller.open_pool("dropped")
        held = run("drop", "dropped")
        caller.call(caller.pools.CloseSession, pools.CloseSessionRequest())
    told = "the pool is in use by 1 other session, 0 sequences and 0 warm pins: end them first"
    assert (held.returncode, held.stdout, held.stderr) == (1, "", f"kvharbor: {told}\n")
    dropped = run("drop", "dropped")
    assert (dropped.returncode, dropped.stdout, dropped.stderr) == (
        0,
        f"pool dropped of tenant uid-{os.getuid()} dropped\n",
        "",
    )
    assert run("drop", "dropped").returncode == 1


def test_drop_tells_how_pins_are_ended(run: Run, pool: str) -> None:
    """They belong to no session that could be ended instead."""
    first = ",".join(str(token) for token in range(32))
    assert run("warm", pool, "pinned", "--ids", first).returncode == 0
    refused = run("drop", pool)
    assert run("unwarm", pool, "pinned").returncode == 0
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr.endswith("and 1 warm pin ('pinned'): end them first, pins with `kvharbor unwarm`\n")


def test_exec_hands_memory_and_session_to_a_command(run: Run, pool: str, harbor: str) -> None:
    """Descriptor 3 is the pool's memory, the token makes calls, and the end of the command ends the session."""
    program = """
import json, os, grpc
from kvharbor.v1 import cache_service_pb2 as cache, cache_service_pb2_grpc as rpc
descriptor = json.loads(os.environ["KVHARBOR_DESCRIPTOR"])
metadata = (("kvharbor-session", os.environ["KVHARBOR_SESSION_TOKEN"]),)
with grpc.insecure_channel("unix:" + os.environ["KVHARBOR_SOCKET"]) as channel:
    request = cache.AllocateRequest(pool_id=os.environ["KVHARBOR_POOL_ID"], token_ids=bytes(4))
    sequence = rpc.CacheServiceStub(channel).Allocate(request, metadata=metadata).sequence
spans = [int(span["offset_bytes"]) for span in descriptor["spans"]]
print(json.dumps([os.fstat(3).st_size, int(descriptor["size_bytes"]), sequence.capacity_tokens, spans]))
"""
    done = run("exec", "--pool", pool, "--", sys.executable, "-c", program)
    assert (done.returncode, done.stderr) == (0, "")
    mapped_bytes, described_bytes, capacity_tokens, offsets = json.loads(done.stdout)
    assert (described_bytes, capacity_tokens, offsets) == (65 * BLOCK_BYTES, 16, [0])
    assert mapped_bytes >= described_bytes
    with RawCaller(harbor) as caller:
        while True:
            snapshot = caller.call(caller.cache.Stats, cache.StatsRequest())
            if next(one for one in snapshot.pools if one.name == pool).sequence_count == 0:
                break
