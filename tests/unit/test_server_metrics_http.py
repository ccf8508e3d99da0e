"""The HTTP port: three pages, and nothing that a caller can hold up."""

import asyncio
import http
import socket
from collections.abc import Awaitable, Callable

import pytest

from kvharbor.server.calls.gate import Gate
from kvharbor.server.errors import Draining
from kvharbor.server.metrics import http_port
from kvharbor.server.metrics.http_port import Answer, HttpPort, liveness_page, readiness_page, text
from kvharbor.server.process.listen import listen_http
from scraping import Page, get

Test = Callable[[HttpPort, str], Awaitable[None]]


async def _broken(accept: str) -> Answer:
    raise RuntimeError("tokens 1 2 3")


def _with_port(gate: Gate, test: Test) -> None:
    """Runs `test` with a port that serves all pages."""

    async def accepted(accept: str) -> Answer:
        return text(http.HTTPStatus.OK, accept)

    async def run() -> None:
        listener, address = listen_http("127.0.0.1:0")
        pages = {
            "/healthz": liveness_page(),
            "/readyz": readiness_page(gate),
            "/accept": accepted,
            "/broken": _broken,
        }
        port = HttpPort(listener, pages)
        await port.start()
        try:
            await test(port, address)
        finally:
            await port.close()

    asyncio.run(run())


def _pages(gate: Gate, *paths: str) -> list[Page]:
    found: list[Page] = []

    async def test(_: HttpPort, address: str) -> None:
        found.extend([await asyncio.to_thread(get, address, path) for path in paths])

    _with_port(gate, test)
    return found


def test_liveness_holds_while_readiness_says_why_not() -> None:
    """A probe can tell starting from dead."""
    gate = Gate("0123456789ab")
    assert _pages(gate, "/healthz", "/readyz") == [Page(200, "alive\n"), Page(503, "STARTING\n")]
    gate.open()
    assert _pages(gate, "/readyz?verbose") == [Page(200, "ready\n")]
    gate.refusal = Draining()
    assert _pages(gate, "/healthz", "/readyz") == [Page(200, "alive\n"), Page(503, "DRAINING\n")]


def test_an_unknown_page_names_those_that_there_are() -> None:
    """Whoever scrapes / by mistake is told."""
    assert _pages(Gate("0123456789ab"), "/") == [Page(404, "there are /healthz, /readyz, /accept, /broken\n")]


def test_a_page_that_fails_tells_nothing_of_the_failure() -> None:
    """The text of an unknown error may hold anything."""
    assert _pages(Gate("0123456789ab"), "/broken") == [Page(500, "internal error; the log of the service has more\n")]


async def _exchange(address: str, request: bytes) -> bytes:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request)
    answer = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    return answer


@pytest.mark.parametrize(
    ("request_bytes", "answer"),
    [
        (b"POST /healthz HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nhi", b"HTTP/1.1 405 Method Not Allowed\r\n"),
        (b"HEAD /healthz HTTP/1.1\r\nHost: a\r\n\r\n", b"HTTP/1.1 200 OK\r\n"),
        (b"nonsense\r\n\r\n", b"HTTP/1.1 405 Method Not Allowed\r\n"),
        (b"GET /healthz HTTP/1.1\r\nA: " + b"x" * 70_000, b""),
    ],
    ids=["post", "head", "nonsense", "endless"],
)
def test_requests_that_are_none_are_answered_or_cut_off(request_bytes: bytes, answer: bytes) -> None:
    """No input keeps a connection or ends the port."""

    async def test(_: HttpPort, address: str) -> None:
        found = await _exchange(address, request_bytes)
        assert found.startswith(answer) if answer else found == b""
        assert b"alive" not in found
        assert await asyncio.to_thread(get, address, "/healthz") == Page(200, "alive\n")

    _with_port(Gate("0123456789ab"), test)


def test_a_silent_caller_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """An open connection without a request ends by itself."""
    monkeypatch.setattr(http_port, "DEADLINE_S", 0.05)

    async def test(_: HttpPort, address: str) -> None:
        assert await _exchange(address, b"GET /healthz") == b""

    _with_port(Gate("0123456789ab"), test)


def test_callers_beyond_the_limit_are_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Open connections do not pile up."""
    monkeypatch.setattr(http_port, "MAX_CONNECTIONS", 2)

    async def test(_: HttpPort, address: str) -> None:
        host, _colon, number = address.rpartition(":")
        idle = [await asyncio.open_connection(host, int(number)) for _ in range(2)]
        assert await asyncio.to_thread(get, address, "/healthz") == Page(503, "too many connections\n")
        for _reader, writer in idle:
            writer.close()

    _with_port(Gate("0123456789ab"), test)


def test_closing_frees_the_port_with_callers_connected() -> None:
    """The next process binds it at once."""

    async def test(port: HttpPort, address: str) -> None:
        host, _colon, number = address.rpartition(":")
        _reader, writer = await asyncio.open_connection(host, int(number))
        await port.close()
        listener, again = listen_http(address)
        listener.close()
        assert again == address
        writer.close()

    _with_port(Gate("0123456789ab"), test)


def test_the_page_gets_the_header() -> None:
    """Names of headers have no case."""

    async def test(_: HttpPort, address: str) -> None:
        answer = await _exchange(address, b"GET /accept HTTP/1.1\r\naCCept: text/html\r\n\r\n")
        assert answer.endswith(b"\r\n\r\ntext/html\n")

    _with_port(Gate("0123456789ab"), test)


def test_a_listener_is_bound_to_either_family() -> None:
    """IPv6 addresses are written with brackets, as they are read."""
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    listener, address = listen_http("[::1]:0")
    listener.close()
    assert address.startswith("[::1]:")
