"""`kvharbor health`: for probes that cannot speak gRPC to a Unix socket."""

import socket as sockets
from typing import Annotated
from urllib.parse import unquote

import typer

from kvharbor.server.commands.options import SocketOption, seconds, start_or_name
from kvharbor.server.errors import CommandError


def health(
    live: Annotated[bool, typer.Option("--live", help="Ask only whether the process answers.")] = False,
    timeout_s: Annotated[float, typer.Option(parser=seconds(0.01), help="Seconds to wait for the answer.")] = 2.0,
    socket: SocketOption = None,
) -> None:
    """Exits with 0 when the service is ready, with 1 when it is not or does not answer.

    With --live it is enough that the process answers: so it does while memory is still being reserved.
    """
    from kvharbor.server.process.readiness import LIVENESS

    state = health_state(socket, service=LIVENESS if live else "", timeout_s=timeout_s)
    typer.echo(state)
    if state != "SERVING":
        raise typer.Exit(1)


def health_state(socket: str | None, *, service: str = "", timeout_s: float) -> str:
    """Returns what gRPC health says of a service: "SERVING", or why not. Raises CommandError where nobody answers."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from kvharbor.client import address

    target = address.parse(socket).target
    _require_listener(target, timeout_s)
    with grpc.insecure_channel(target, options=[("grpc.enable_http_proxy", 0)]) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        try:
            answer = check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s, wait_for_ready=True)
        except grpc.RpcError as failure:
            raise CommandError(f"no answer at {target}: {failure.code().name}") from None
    state: str = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return state


def _require_listener(target: str, timeout_s: float) -> None:
    """Raises CommandError for a Unix socket that cannot be connected to: gRPC only knows that time has run out."""
    if not target.startswith("unix:"):
        return
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as probe:
        probe.settimeout(timeout_s)
        try:
            probe.connect(unquote(target.removeprefix("unix:")))
        except FileNotFoundError:
            why = f"there is no such socket; {start_or_name(target)}"
        except PermissionError:
            why = "permission denied; see the settings socket_mode and socket_group"
        except ConnectionRefusedError:
            why = "nobody listens there; start `kvharbor serve` again"
        except OSError as failure:
            why = failure.strerror or str(failure)
        else:
            return
    raise CommandError(f"no answer at {target}: {why}")
