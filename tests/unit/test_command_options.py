"""What commands share: where tokens come from, seconds, and what is said where no service or session is."""

import struct
from pathlib import Path

import pytest
import typer

from kvharbor.client import ServiceUnreachable, SessionRequired
from kvharbor.client.address import DEFAULT_SOCKET
from kvharbor.server.commands.options import in_own_words, seconds, start_or_name, tokens_of
from kvharbor.server.errors import CommandError

START_OR_NAME = "start one with `kvharbor serve`, or name its socket with --socket or KVHARBOR_SOCKET"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "tokens"


@pytest.mark.parametrize("text", ["1,2,30", "1 2 30\n", "\ufeff1\n2\n30\n", "1,\t2,\r\n30"])
def test_a_file_of_text_has_ids(file: Path, text: str) -> None:
    """Commas and white space between, with or without a mark of UTF-8 before."""
    file.write_text(text, encoding="utf-8", newline="")
    assert tokens_of(str(file), None) == [1, 2, 30]


@pytest.mark.parametrize("ids", [(1, 2, 30), (0,), (2**24 - 1,), (0x20_21_22,) * 3, (2**32 - 1,)])
def test_a_file_that_is_no_text_has_raw_tokens(file: Path, ids: tuple[int, ...]) -> None:
    """Even if most of its bytes are letters."""
    raw = struct.pack(f"<{len(ids)}I", *ids)
    file.write_bytes(raw)
    assert tokens_of(str(file), None) == raw


@pytest.mark.parametrize(
    ("text", "number", "word"),
    [
        ("1 2 x3 4", 3, "x3"),
        ("12;3", 1, "12;3"),
        ("1,2,-3,4", 3, "-3"),
        ("1.5 o.k.", 1, "1.5"),
        ("größe 12 3", 1, "größe"),
    ],
)
def test_a_mistake_in_a_text_is_told_of_and_not_taken_for_raw_tokens(
    file: Path, text: str, number: int, word: str
) -> None:
    """Of four bytes or eight, which uint32 would be as well."""
    assert len(text.encode()) % 4 == 0
    file.write_text(text, encoding="utf-8")
    with pytest.raises(CommandError) as refused:
        tokens_of(str(file), None)
    assert str(refused.value).startswith(f"{file}: '{word}', number {number}, is no token id: ")


def test_a_file_that_was_given_as_ids_is_quoted_with_the_option_for_files(file: Path) -> None:
    """The value that was meant as a path."""
    with pytest.raises(CommandError, match=r"'/data/a\.bin', number 1, is no token id: .*for a file use --tokens"):
        tokens_of(None, "/data/a.bin")


@pytest.mark.parametrize("text", ["", " ,\n"])
def test_a_file_without_tokens_is_named(file: Path, text: str) -> None:
    """The service would speak of a field that nobody has written."""
    file.write_text(text)
    with pytest.raises(CommandError, match=f"^{file} has no token ids: write whole numbers") as refused:
        tokens_of(str(file), None)
    assert refused.value.status == 2


@pytest.mark.parametrize("text", ["5s", "5m", "", "nan", "inf", "0.4"])
def test_what_are_no_seconds_is_refused_with_an_example(text: str) -> None:
    """As a unit looks like one."""
    with pytest.raises(typer.BadParameter, match=r"write seconds, e\.g\. 5, 0\.5 at least"):
        seconds(0.5)(text)
    assert [seconds(0.5)(each) for each in ("0.5", "7", 3.0)] == [0.5, 7.0, 3.0]


def test_a_misspelt_variable_is_named_where_the_default_socket_has_no_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be why that socket was tried; where another one was named it is not."""
    monkeypatch.delenv("KVHARBOR_SOCKET", raising=False)
    assert start_or_name(DEFAULT_SOCKET) == START_OR_NAME
    monkeypatch.setenv("KVHARBOR_SOKET", "/tmp/kv.sock")
    told = f"{START_OR_NAME}; the environment has the unknown setting 'KVHARBOR_SOKET'; did you mean 'KVHARBOR_SOCKET'?"
    assert start_or_name(DEFAULT_SOCKET) == start_or_name(f"unix:{DEFAULT_SOCKET}") == told
    assert start_or_name("/tmp/kv.sock") == START_OR_NAME
    monkeypatch.setenv("KVHARBOR_SOCKET", DEFAULT_SOCKET)
    assert start_or_name(DEFAULT_SOCKET) == START_OR_NAME


@pytest.mark.parametrize(
    ("cause", "told"),
    [
        ("No such file or directory", "No such file or directory"),
        (
            "failed to connect to all addresses; last error: FAILED_PRECONDITION: unix:/a.sock: connect failed: "
            "addr: unix:/a.sock error: No such file or directory",
            "No such file or directory",
        ),
        (
            "errors resolving x:1: [field:hostname lookup error:address lookup failed for x:1: Domain name not found]",
            "Domain name not found",
        ),
    ],
)
def test_a_service_that_is_not_there_is_told_in_plain_words(cause: str, told: str) -> None:
    """The address, what the system says, and what to do on a command line."""
    metadata = {"address": "unix:/a.sock", "cause": cause, "remedy": "connect() elsewhere"}
    words = in_own_words(ServiceUnreachable(f"nobody ({cause}): connect() elsewhere", metadata=metadata))
    assert words == f"no kvharbor service answers at /a.sock ({told}): {START_OR_NAME}"


def test_other_refusals_are_told_as_the_client_has_them() -> None:
    """Such as a socket that may not be entered: its remedy is another one."""
    assert in_own_words(ServiceUnreachable("mode 0600", metadata={"address": "/a.sock"})) == "mode 0600"


def test_without_a_session_an_operator_is_not_told_of_the_wire() -> None:
    """But where the session is to be had."""
    words = in_own_words(SessionRequired('send its session token as metadata "kvharbor-session"'))
    assert "kvharbor-session" not in words
    assert "name the Unix socket of the service" in words
