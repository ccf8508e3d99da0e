"""I1: a pool is as large as the operator wrote, or there is an error."""

import mmap
from pathlib import Path

import grpc
import pytest

from conftest import StartService
from kvharbor.v1 import pool_service_pb2 as pools
from kvharbor.v1 import types_pb2
from raw_caller import RawCaller, Refused, refused, small_layout
from service_process import failed_start

BLOCK_BYTES = 2_097_152
MOST_START_S = 2.0


def large_layout() -> types_pb2.Layout:
    """Returns a layout with blocks of 2 MiB and no scratch blocks."""
    layout = small_layout(scratch_block_count=0)
    layout.planes[0].head_count, layout.planes[0].head_dim = 256, 128
    layout.planes[0].page_bytes = BLOCK_BYTES
    return layout


def open_refused(caller: RawCaller, layout: types_pb2.Layout, size_bytes: int, name: str = "p") -> Refused:
    """Opens a pool and returns the refusal."""
    with refused() as found:
        caller.call(caller.pools.OpenPool, pools.OpenPoolRequest(name=name, layout=layout, size_bytes=size_bytes))
    return found[0]


def refused_start(tmp_path: Path, *flags: str, environment: dict[str, str] | None = None) -> str:
    """Starts a service that cannot start; returns its one line."""
    return failed_start(tmp_path / "kv.sock", *flags, within_s=MOST_START_S, environment=environment)


@pytest.mark.slow
def test_sizes_in_a_file_make_exactly_the_blocks_they_hold(start_fresh: StartService, tmp_path: Path) -> None:
    """I1: 512, 476 with 1,755,648 bytes unused, and 768 blocks; GB is not GiB."""
    file = tmp_path / "kvharbor.toml"
    sizes = {"gib": "1GiB", "gb": "1GB", "more": "1.5GiB", "less": "2097151B"}
    file.write_text("".join(f'[pools.{name}]\nsize = "{size}"\n' for name, size in sizes.items()))
    service = start_fresh(memory="1.5GiB", config=str(file))
    with RawCaller(str(service.socket)) as caller:
        made = {}
        for name in ("gib", "gb", "more"):
            opening = pools.OpenPoolRequest(name=name, layout=large_layout())
            descriptor = caller.call(caller.pools.OpenPool, opening, wait_for_ready=True).pool
            made[name] = descriptor.block_count
            caller.call(caller.pools.DropPool, pools.DropPoolRequest(pool_id=descriptor.pool_id))
        assert made == {"gib": 512, "gb": 476, "more": 768}
        found = open_refused(caller, large_layout(), 0, "less")
        assert (found.code, found.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
        assert "less than one block" in found.metadata["value"]
    unused = [service.wait_for("pool made", number)["unused_bytes"] for number in (1, 2, 3)]
    assert unused == [0, 1_755_648, 0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "named"),
    [
        ("512", "'512' has no unit; write e.g. 512MiB or 512GiB, or 512B for bytes"),
        ("0", "write a positive number and a unit"),
        ("-1", "write a positive number and a unit"),
        ("0GiB", "write a positive number and a unit"),
        ("99PiB", "needs 111464090777419776 bytes (99.0 PiB), have "),
    ],
)
def test_a_size_that_is_none_or_too_much_is_an_error(tmp_path: Path, size: str, named: str) -> None:
    """I1: bytes need their unit, nothing is no pool, and what is available is named before any of it is touched."""
    assert named in refused_start(tmp_path, f"--memory={size}")


@pytest.mark.slow
def test_an_unknown_key_names_the_nearest_one(tmp_path: Path) -> None:
    """I1: in the file and in the environment; a flag is refused by the command line."""
    file = tmp_path / "kvharbor.toml"
    file.write_text('pool_byte = "1GiB"\n')
    assert "'pool_byte'; did you mean 'pools'?" in refused_start(tmp_path, f"--config={file}")
    assert "'KVHARBOR_MEMORYS'; did you mean 'KVHARBOR_MEMORY'?" in refused_start(
        tmp_path, environment={"KVHARBOR_MEMORYS": "1GiB"}
    )


@pytest.mark.slow
def test_the_winning_source_is_logged(start_fresh: StartService, tmp_path: Path) -> None:
    """I1: one key by flag, environment and file: the flag wins, and the log says so."""
    file = tmp_path / "kvharbor.toml"
    file.write_text('memory = "3MiB"\ngrace_s = 3\nmax_sessions = 3\n')
    environment = {"KVHARBOR_MEMORY": "2MiB", "KVHARBOR_GRACE_S": "2"}
    service = start_fresh(memory="1MiB", config=str(file), environment=environment)
    logged = service.wait_for("settings")
    assert [logged[name] for name in ("memory", "grace_s", "max_sessions")] == [
        "1MiB (flag)",
        "2 (environment)",
        "3 (file)",
    ]


@pytest.mark.parametrize("block_tokens", [0, -16, 8, 17, 528])
def test_block_tokens_outside_the_range_are_refused(harbor: str, block_tokens: int) -> None:
    """I1: 16 to 512 in multiples of 16."""
    with RawCaller(harbor) as caller:
        found = open_refused(caller, small_layout(block_tokens=block_tokens), 0)
        assert (found.code, found.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "LAYOUT_INVALID")
        assert (found.metadata["field"], found.metadata["value"]) == ("block_tokens", str(block_tokens))


def test_pages_that_are_not_aligned_are_refused(harbor: str) -> None:
    """I1: a page of 1,000 bytes is an error, not rounded."""
    layout = small_layout()
    layout.planes[0].page_bytes = 1000
    with RawCaller(harbor) as caller:
        found = open_refused(caller, layout, 0)
        assert (found.reason, found.metadata["field"]) == ("LAYOUT_INVALID", "planes.k.page_bytes")


@pytest.mark.parametrize("size_bytes", [-1, 1, 2047])
def test_a_size_from_the_wire_holds_a_block_or_is_refused(harbor: str, size_bytes: int) -> None:
    """I1: less than one block beside the scratch block is no pool."""
    with RawCaller(harbor) as caller:
        found = open_refused(caller, small_layout(), size_bytes)
        assert (found.code, found.metadata["field"]) == (grpc.StatusCode.INVALID_ARGUMENT, "size_bytes")


@pytest.mark.parametrize("size_bytes", [111_464_090_777_419_776, 2**63 - 1])
def test_a_size_from_the_wire_beyond_the_budget_names_what_is_left(harbor: str, size_bytes: int) -> None:
    """I1: 99 PiB asked of a small service."""
    with RawCaller(harbor) as caller:
        left = caller.pools.GetServerInfo(pools.GetServerInfoRequest()).memory_available_bytes
        found = open_refused(caller, small_layout(), size_bytes)
        assert (found.code, found.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "INSUFFICIENT_MEMORY")
        assert found.metadata == {
            "neededBytes": str(-(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE),
            "availableBytes": str(left),
            "limitedBy": "the setting memory",
        }
