"""Where a service is."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kvharbor.client import InvalidField, aio, connect
from kvharbor.client.address import DEFAULT_SOCKET, Address, parse
from kvharbor.client.sizes import size_bytes


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("unix:/run/h/kv.sock", Address("unix:/run/h/kv.sock", "/run/h/kv.side")),
        ("unix:///run/h/kv.sock", Address("unix:/run/h/kv.sock", "/run/h/kv.side")),
        ("/run/h/kv.sock", Address("unix:/run/h/kv.sock", "/run/h/kv.side")),
        ("/run/h/kv", Address("unix:/run/h/kv", "/run/h/kv.side")),
        ("/run/50%25 a#b?/kv.sock", Address("unix:/run/50%2525%20a%23b%3F/kv.sock", "/run/50%25 a#b?/kv.side")),
        ("/run/\udcff.sock", Address("unix:/run/%FF.sock", "/run/\udcff.side")),
        ("localhost:7070", Address("localhost:7070", None)),
        ("[::1]:7070", Address("[::1]:7070", None)),
    ],
)
def test_a_target_names_the_channel_and_the_side_socket_beside_it(target: str, expected: Address) -> None:
    """The ending .sock becomes .side, else .side is appended; TCP has none. gRPC decodes the path of a target."""
    assert parse(target) == expected


def test_without_a_target_the_environment_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """KVHARBOR_SOCKET first, the well-known path otherwise."""
    monkeypatch.setenv("KVHARBOR_SOCKET", "/tmp/other.sock")
    assert parse(None).target == "unix:/tmp/other.sock"
    monkeypatch.delenv("KVHARBOR_SOCKET")
    assert parse(None).target == f"unix:{DEFAULT_SOCKET}"


@pytest.mark.parametrize("target", ["s/kv.sock", "./s/kv.sock", Path("s/kv.sock"), Path("s") / ".." / "s" / "kv.sock"])
def test_a_relative_path_counts_from_the_working_directory(
    target: str | Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it does for `kvharbor serve`; a "/" tells it from a host."""
    monkeypatch.chdir(tmp_path)
    assert Address(f"unix:{tmp_path}/s/kv.sock", f"{tmp_path}/s/kv.side") == parse(target)


def test_a_path_object_is_a_path_whatever_it_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where text without a "/" would be taken for a host."""
    monkeypatch.chdir(tmp_path)
    assert parse(tmp_path / "kv.sock") == parse(Path("kv.sock")) == parse(f"unix:{tmp_path}/kv.sock")


@pytest.mark.parametrize("target", ["", "relative.sock", "unix:relative.sock", "host:", "host:port", ":7070"])
def test_what_is_no_target_is_refused_with_the_forms_that_are(target: str) -> None:
    """The remedy is in the message."""
    with pytest.raises(InvalidField, match="target"):
        parse(target)


def test_a_path_that_no_socket_can_have_is_refused_with_the_limit() -> None:
    """The kernel takes 107 bytes; the side socket's path may be the longer one."""
    assert parse("/" + "x" * 101 + ".sock").side_path is not None
    with pytest.raises(InvalidField, match="at most 107 bytes"):
        parse("/" + "x" * 102 + ".sock" + "y")


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("nan"), float("inf"), "1"])
def test_no_call_is_without_a_deadline(timeout_s: Any) -> None:
    """Zero would mean none to the kernel, and a call that nobody answers would never end."""
    with pytest.raises(InvalidField, match="timeout_s"):
        connect("/nowhere.sock", timeout_s=timeout_s)
    with pytest.raises(InvalidField, match="timeout_s"):
        asyncio.run(aio.connect("/nowhere.sock", timeout_s=timeout_s))


@pytest.mark.parametrize(
    ("size", "expected"),
    [(None, 0), (4096, 4096), ("4096B", 4096), ("1GiB", 2**30), ("1.5 gib", 3 * 2**29), ("2MB", 2_000_000)],
)
def test_sizes_are_read_as_people_write_them(size: str | int | None, expected: int) -> None:
    """Binary and decimal units, any case; None leaves the choice to the service."""
    assert size_bytes(size) == expected


@pytest.mark.parametrize("size", ["", "big", "-1", "1 parsec", 0, -5, 1.5])
def test_what_is_no_size_is_refused(size: str | int) -> None:
    """Zero too: an empty pool is a mistake, not a default."""
    with pytest.raises(InvalidField, match="size"):
        size_bytes(size)


def test_a_size_in_text_has_a_unit() -> None:
    """As in the settings of the service: "2" is more likely 2 GiB than 2 bytes."""
    with pytest.raises(InvalidField, match=r"write 2B for bytes, or e\.g\. 2MiB"):
        size_bytes("2")
