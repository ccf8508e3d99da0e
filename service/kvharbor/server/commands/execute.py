"""`kvharbor exec`: a session and a pool's memory for a command in any language.

The command inherits the memory as descriptor 3, and the side socket: the session lives until the command and
every process that it leaves behind are gone.
"""

import os
import socket as sockets
import struct
from typing import TYPE_CHECKING, Annotated

import typer

from kvharbor.server.commands.options import SocketOption, start_or_name
from kvharbor.server.errors import CommandError

if TYPE_CHECKING:
    from kvharbor.v1 import side_pb2, types_pb2

ARENA_FD = 3
_LENGTH = struct.Struct("<I")
_TIMEOUT_S = 10.0
# As shells have it.
_EXIT_NOT_EXECUTABLE = 126
_EXIT_NOT_FOUND = 127


def execute(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="What to run.")],
    pool: Annotated[str, typer.Option("--pool", help="Name of an existing pool of the own tenant.")],
    client_name: Annotated[str, typer.Option(help="Name of the session in logs. Default: the command.")] = "",
    socket: SocketOption = None,
) -> None:
    """Runs COMMAND with a session of its own and the memory of a pool as file descriptor 3.

    Its environment has KVHARBOR_SOCKET, KVHARBOR_SESSION_TOKEN (the metadata "kvharbor-session" of its gRPC
    calls), KVHARBOR_POOL_ID and KVHARBOR_DESCRIPTOR (the pool's PoolDescriptor as JSON). The exit status is that
    of COMMAND; 127 when there is no such command, 126 when it cannot be executed. A pool on a device is refused:
    its memory cannot be passed on as one descriptor.
    """
    _reserve_arena_fd()
    from google.protobuf import json_format

    from kvharbor.client import address
    from kvharbor.v1 import side_pb2

    where = address.parse(socket)
    if where.side_path is None:
        raise CommandError(f"{where.target} has no side socket: name the Unix socket of the service")
    side = sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM)
    side.settimeout(_TIMEOUT_S)
    try:
        side.connect(where.side_path)
    except OSError as failure:
        raise CommandError(
            f"no kvharbor service answers at {where.text}: {failure.strerror}; {start_or_name(where.text)}"
        ) from None
    # Arguments are bytes, of which a message takes those that are UTF-8; a name is of 128 at most.
    name = os.fsencode(client_name) or os.fsencode(command[0])[-128:]
    hello = side_pb2.Hello(
        client_name=name.decode(errors="ignore"), client_version="kvharbor-exec", api_versions=["v1"]
    )
    welcome, _ = _ask(side, side_pb2.SideRequest(hello=hello))
    token = welcome.welcome.session_token
    opened = _open_pool(where.target, token, pool, tenant=welcome.welcome.tenant)
    attached, fds = _ask(side, side_pb2.SideRequest(attach=side_pb2.Attach(pool_id=opened.pool_id)))
    _inherit(side, fds[0])
    environment = {
        **os.environ,
        "KVHARBOR_SOCKET": where.text,
        "KVHARBOR_SESSION_TOKEN": token,
        "KVHARBOR_POOL_ID": opened.pool_id,
        "KVHARBOR_DESCRIPTOR": json_format.MessageToJson(
            attached.attached.pool,
            indent=None,
            preserving_proto_field_name=True,
            # A reader of JSON does not know that zeros are left out: the first span begins at one.
            always_print_fields_with_no_presence=True,
        ),
    }
    try:
        os.execvpe(command[0], command, environment)
    except OSError as failure:
        is_missing = isinstance(failure, FileNotFoundError | NotADirectoryError)
        status = _EXIT_NOT_FOUND if is_missing else _EXIT_NOT_EXECUTABLE
        raise CommandError(f"cannot run {command[0]}: {failure.strerror}", status=status) from None


def _open_pool(target: str, token: str, name: str, *, tenant: str) -> "types_pb2.PoolDescriptor":
    """Opens the tenant's existing pool of that name, as it is, for the session.

    An administrator sees others' as well, and would make one of its own by opening one of these.
    """
    import grpc

    from kvharbor.v1 import pool_service_pb2 as pb
    from kvharbor.v1 import pool_service_pb2_grpc as rpc

    metadata = (("kvharbor-session", token),)
    with grpc.insecure_channel(target, options=[("grpc.enable_http_proxy", 0)]) as channel:
        stub = rpc.PoolServiceStub(channel)
        request = pb.ListPoolsRequest()
        try:
            while True:
                page = stub.ListPools(request, metadata=metadata, timeout=_TIMEOUT_S)
                for found in page.pools:
                    if (found.name, found.tenant) == (name, tenant):
                        _require_descriptor(found)
                        opening = pb.OpenPoolRequest(name=name, layout=found.layout)
                        return stub.OpenPool(opening, metadata=metadata, timeout=_TIMEOUT_S).pool
                request.page_token = page.next_page_token
                if not request.page_token:
                    raise CommandError(
                        f"no pool of tenant {tenant} is named {name!r}: a worker has to open it first, with its layout"
                        "; `kvharbor stats` shows those that are there"
                    )
        except grpc.RpcError as failure:
            raise CommandError(f"cannot open pool {name!r}: {failure.details()}") from None


def _require_descriptor(found: "types_pb2.PoolDescriptor") -> None:
    """Raises CommandError for memory of a device, which no one descriptor is."""
    if found.arena_kind != "host":
        raise CommandError(
            f"pool {found.name!r} is in memory of the arena {found.arena_kind}, which one file descriptor cannot pass "
            f"on: use clients/python or clients/cpp in the worker, or a pool of a service with the arena 'host'"
        )


def _ask(side: sockets.socket, request: "side_pb2.SideRequest") -> "tuple[side_pb2.SideResponse, list[int]]":
    """Sends one request; returns the response and the descriptors that came with it."""
    from kvharbor.v1 import side_pb2

    encoded = request.SerializeToString()
    try:
        side.sendall(_LENGTH.pack(len(encoded)) + encoded)
        head, fds, _, _ = sockets.recv_fds(side, _LENGTH.size, maxfds=1)
        head += _rest(side, _LENGTH.size - len(head))
        response = side_pb2.SideResponse.FromString(_rest(side, _LENGTH.unpack(head)[0]))
    except OSError as failure:
        raise CommandError(f"the service has closed the side socket: {failure.strerror or failure}") from None
    if response.HasField("refused"):
        raise CommandError(response.refused.message)
    return response, fds


def _rest(side: sockets.socket, size_bytes: int) -> bytes:
    received = bytearray()
    while len(received) < size_bytes:
        piece = side.recv(size_bytes - len(received))
        if not piece:
            raise ConnectionError("it ended in the middle of a frame")
        received += piece
    return bytes(received)


def _reserve_arena_fd() -> None:
    """Takes number ARENA_FD before gRPC's threads open anything.

    To put the memory at a number that another thread is just being given fails with EBUSY, and at one that it has
    been given would pull that away.
    """
    placeholder = os.open(os.devnull, os.O_RDONLY)
    if placeholder != ARENA_FD:
        os.dup2(placeholder, ARENA_FD)
        os.close(placeholder)


def _inherit(side: sockets.socket, arena: int) -> None:
    """Leaves exactly two descriptors to the command: the memory as ARENA_FD, and the side socket."""
    side.settimeout(None)
    os.set_inheritable(side.detach(), True)
    os.dup2(arena, ARENA_FD, inheritable=True)
    os.close(arena)
