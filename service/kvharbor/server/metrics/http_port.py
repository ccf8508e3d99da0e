"""The HTTP port for Prometheus and for probes: GET /metrics, /healthz and /readyz, and nothing else."""

import asyncio
import http
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog

from kvharbor.server.calls.gate import Gate

log = structlog.get_logger(__name__)

MAX_CONNECTIONS = 32
"""More are turned away: a scraper needs one."""
_MAX_HEAD_BYTES = 8192
DEADLINE_S = 10.0
"""For a whole request; whoever takes longer is cut off."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a page says."""

    status: http.HTTPStatus
    content_type: str
    body: bytes


def text(status: http.HTTPStatus, line: str) -> Answer:
    """Returns an answer of one line."""
    return Answer(status, "text/plain; charset=utf-8", f"{line}\n".encode())


Page = Callable[[str], Awaitable[Answer]]
"""Makes an answer; the argument is the request's Accept header."""


def liveness_page() -> Page:
    """Returns the page of a process that answers."""

    async def page(accept: str) -> Answer:  # noqa: ARG001
        return text(http.HTTPStatus.OK, "alive")

    return page


def readiness_page(gate: Gate) -> Page:
    """Returns the page that says whether calls are let in, and if not, why."""

    async def page(accept: str) -> Answer:  # noqa: ARG001
        if gate.refusal is None:
            return text(http.HTTPStatus.OK, "ready")
        return text(http.HTTPStatus.SERVICE_UNAVAILABLE, gate.refusal.reason)

    return page


class HttpPort:
    """Serves pages by path, one request a connection, on the event loop: it answers only while that turns.

    Whoever sends or reads too slowly is cut off. Takes over `listener`.
    """

    def __init__(self, listener: socket.socket, pages: dict[str, Page]) -> None:
        self._listener = listener
        self._pages = pages
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Begins to answer."""
        self._server = await asyncio.start_server(self._serve, sock=self._listener, limit=_MAX_HEAD_BYTES)

    async def close(self) -> None:
        """Frees the port and cuts off who is connected."""
        if self._server is None:
            self._listener.close()
            return
        self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        try:
            async with asyncio.timeout(DEADLINE_S):
                await self._answer(reader, writer)
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            # The caller has left, is too slow, or speaks no HTTP.
            pass
        finally:
            writer.transport.abort() if writer.is_closing() else writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, _, rest = head[0].partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        answer = await self._page(method, path, _header(head, "accept"))
        lines = (
            f"HTTP/1.1 {answer.status.value} {answer.status.phrase}",
            f"Content-Type: {answer.content_type}",
            f"Content-Length: {len(answer.body)}",
            "Connection: close",
            "\r\n",
        )
        writer.write("\r\n".join(lines).encode("latin-1") + (b"" if method == "HEAD" else answer.body))
        await writer.drain()
        writer.write_eof()
        # Until the caller closes: a close with unread bytes of his would take the answer away from him.
        await reader.read(_MAX_HEAD_BYTES)

    async def _page(self, method: str, path: str, accept: str) -> Answer:
        if len(self._connections) > MAX_CONNECTIONS:
            return text(http.HTTPStatus.SERVICE_UNAVAILABLE, "too many connections")
        if method not in ("GET", "HEAD"):
            return text(http.HTTPStatus.METHOD_NOT_ALLOWED, "only GET")
        page = self._pages.get(path)
        if page is None:
            return text(http.HTTPStatus.NOT_FOUND, f"there are {', '.join(self._pages)}")
        try:
            return await page(accept)
        except Exception:
            log.exception("page failed", path=path)
            return text(http.HTTPStatus.INTERNAL_SERVER_ERROR, "internal error; the log of the service has more")


def _header(head: list[str], name: str) -> str:
    for line in head[1:]:
        found, _, value = line.partition(":")
        if found.strip().lower() == name:
            return value.strip()
    return ""
