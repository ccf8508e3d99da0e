"""`kvharbor lookup`, `warm` and `unwarm`: what of a prompt is there, and keeping it there."""

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated

import typer

from kvharbor.server.commands.options import (
    EXIT_USAGE,
    AdapterOption,
    IdsOption,
    JsonOption,
    PinArgument,
    PoolArgument,
    SaltFileOption,
    SocketOption,
    TenantOption,
    TokensOption,
    VersionOption,
    connected,
    namespace_of,
    seconds,
    tokens_of,
)
from kvharbor.server.errors import CommandError

if TYPE_CHECKING:
    from kvharbor.client import Namespace, PoolHandle, WarmOrder


def lookup(
    pool: PoolArgument,
    tokens: TokensOption = None,
    ids: IdsOption = None,
    version: VersionOption = "",
    adapter: AdapterOption = "",
    salt_file: SaltFileOption = None,
    as_json: JsonOption = False,
    tenant: TenantOption = None,
    socket: SocketOption = None,
) -> None:
    """Tells how much of a prompt is in the pool, and why not more. Changes nothing."""
    prompt = tokens_of(tokens, ids)
    namespace = namespace_of(version, adapter, salt_file)
    with connected(socket) as harbor:
        found = harbor.find_pool(pool, tenant).lookup(prompt, namespace=namespace)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(found)))
    else:
        typer.echo(f"{found.present_tokens} tokens present, {found.cached_tokens} would be reused")
        if found.miss is not None:
            typer.echo(f"behind token {found.miss.present_tokens}: {found.miss}")
        elif not found.present_tokens:
            typer.echo("the prompt is shorter than a block, and only whole blocks are shared")


def warm(
    pool: PoolArgument,
    name: PinArgument,
    tokens: TokensOption = None,
    ids: IdsOption = None,
    ttl_s: Annotated[
        float | None, typer.Option(parser=seconds(), help="Seconds that the pin lives. Default: until unwarm.")
    ] = None,
    wait_s: Annotated[
        float, typer.Option(parser=seconds(), help="Seconds to wait for an engine to compute the rest.")
    ] = 0.0,
    present_only: Annotated[bool, typer.Option("--present-only", help="Pin what is there, compute nothing.")] = False,
    version: VersionOption = "",
    adapter: AdapterOption = "",
    salt_file: SaltFileOption = None,
    as_json: JsonOption = False,
    tenant: TenantOption = None,
    socket: SocketOption = None,
) -> None:
    """Pins a prefix, so that it is not evicted, and asks an attached engine to compute what is missing of it.

    Whole blocks count. Exit status 1 when tokens are missing at the end of --wait-s or with --present-only, or
    when no attached engine accepts such tasks: the task then waits for one.
    """
    if present_only and wait_s:
        raise CommandError("with --present-only there is nothing to wait for: leave out --wait-s", status=EXIT_USAGE)
    prompt = tokens_of(tokens, ids)
    namespace = namespace_of(version, adapter, salt_file)
    with connected(socket) as harbor:
        handle = harbor.find_pool(pool, tenant)
        if present_only:
            warmed = _present(handle, prompt, name, ttl_s, namespace)
        else:
            warmed = handle.warmup_by_engine(prompt, name, ttl_s, namespace=namespace)
            if wait_s and warmed.task_pending and warmed.accepting_session_count:
                # The same once more: it finds its task.
                warmed = handle.warmup_by_engine(prompt, name, ttl_s, namespace=namespace, wait_s=wait_s)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(warmed)))
    else:
        told = "" if present_only else _outlook(warmed)
        typer.echo(f"{warmed.pinned_tokens} tokens pinned as {name}, {warmed.missing_tokens} missing{told}")
    being_done = warmed.task_pending and warmed.accepting_session_count and not wait_s
    if warmed.missing_tokens and not being_done:
        raise typer.Exit(1)


def _present(
    handle: "PoolHandle", prompt: bytes | list[int], name: str, ttl_s: float | None, namespace: "Namespace"
) -> "WarmOrder":
    from kvharbor.client import WarmOrder

    found = handle.warmup_present(prompt, name, ttl_s, namespace=namespace)
    return WarmOrder(
        found.pinned_tokens, found.missing_tokens, found.ttl_s, task_pending=False, accepting_session_count=0
    )


def _outlook(warmed: "WarmOrder") -> str:
    """Says what becomes of the tokens that are missing."""
    if not warmed.missing_tokens:
        return ""
    if not warmed.task_pending:
        return ": their task has ended, see the log of the service"
    if not warmed.accepting_session_count:
        return ": no attached engine accepts warm tasks; the task for the missing tokens waits for one"
    return ": an engine is to compute them"


def unwarm(pool: PoolArgument, name: PinArgument, tenant: TenantOption = None, socket: SocketOption = None) -> None:
    """Ends a pin, and the task to compute what is missing of it."""
    with connected(socket) as harbor:
        handle = harbor.find_pool(pool, tenant)
        handle.unwarm(name)
    typer.echo(f"pin {name} of pool {pool} of tenant {handle.tenant} ended")
