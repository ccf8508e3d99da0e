"""An administrator's view of the sessions, over a session that goes on when the service's process is replaced."""

import socket

import grpc

from kvharbor.v1 import pool_service_pb2 as pools
from kvharbor.v1 import pool_service_pb2_grpc, side_pb2
from raw_caller import ask, hello, side_connection

OPTIONS = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
"""A channel shared with others would wait between its attempts to connect."""
_DEADLINE_S = 0.5
_PAGE = pools.ListSessionsRequest(page_size=200)


class Sessions:
    """Who is there. Its calls raise grpc.RpcError or OSError while the service is away."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._side: socket.socket | None = None
        self._welcome: side_pb2.Welcome | None = None
        self._channel: grpc.Channel | None = None
        self._listed: dict[str, list[int]] = {}

    def reconnect(self) -> None:
        """Has the next call go on with the session first: the service's process is another one."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def vanished(self) -> list[tuple[str, list[int]]]:
        """Returns the sessions that were listed by the last call and are not any more, with their processes."""
        sessions = self._list().sessions
        present = {session.session_id: [member.pid for member in session.members] for session in sessions}
        gone = [(name, pids) for name, pids in self._listed.items() if name not in present]
        self._listed = present
        return gone

    def _list(self) -> pools.ListSessionsResponse:
        if self._channel is None or self._welcome is None:
            self._channel, self._welcome = self._open()
        metadata = (("kvharbor-session", self._welcome.session_token),)
        stub = pool_service_pb2_grpc.PoolServiceStub(self._channel)
        try:
            reply: pools.ListSessionsResponse = stub.ListSessions(_PAGE, metadata=metadata, timeout=_DEADLINE_S)
        except grpc.RpcError:
            self.reconnect()
            raise
        return reply

    def _open(self) -> tuple[grpc.Channel, side_pb2.Welcome]:
        """Opens a session, or goes on with the one there was."""
        side = side_connection(self._target.removeprefix("unix:"))
        side.settimeout(_DEADLINE_S)
        request = hello("chaos-observer")
        if self._welcome is not None:
            resume = side_pb2.Resume(token=self._welcome.session_token, epoch=self._welcome.epoch)
            request.hello.resume.CopyFrom(resume)
        try:
            response, _ = ask(side, request)
        except OSError:
            side.close()
            raise
        if self._side is not None:
            self._side.close()
        self._side = side
        if response.WhichOneof("response") != "welcome":
            # A new epoch, or the service had given this session up: the next call opens another.
            self._welcome = None
            raise ConnectionError(response.refused.message)
        return grpc.insecure_channel(self._target, options=OPTIONS), response.welcome
