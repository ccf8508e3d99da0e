"""`kvharbor lookup`, `warm` and `unwarm`: what of a prompt is there, and keeping it there."""

import dataclasses
import json
from typing import Annotated

import typer

from kvharbor.server.commands.options import (
    AdapterOption,
    IdsOption,
    JsonOption,
    PinArgument,
    PoolArgument,
    SaltFileOption,
    SocketOption,
    TokensOption,
    VersionOption,
    connected,
    namespace_of,
    tokens_of,
)


def lookup(
    pool: PoolArgument,
    tokens: TokensOption = None,
    ids: IdsOption = None,
    version: VersionOption = "",
    adapter: AdapterOption = "",
    salt_file: SaltFileOption = None,
    as_json: JsonOption = False,
    socket: SocketOption = None,
) -> None:
    """Tells how much of a prompt is in the pool. Changes nothing."""
    prompt = tokens_of(tokens, ids)
    namespace = namespace_of(version, adapter, salt_file)
    with connected(socket) as harbor:
        found = harbor.find_pool(pool).lookup(prompt, namespace=namespace)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(found)))
    else:
        typer.echo(f"{found.present_tokens} tokens present, {found.cached_tokens} would be reused")


def warm(
    pool: PoolArgument,
    name: PinArgument,
    tokens: TokensOption = None,
    ids: IdsOption = None,
    ttl_s: Annotated[float | None, typer.Option(help="Seconds that the pin lives. Default: until unwarm.")] = None,
    version: VersionOption = "",
    adapter: AdapterOption = "",
    salt_file: SaltFileOption = None,
    as_json: JsonOption = False,
    socket: SocketOption = None,
) -> None:
    """Pins what is there of a prefix, so that it is not evicted. Computes nothing.

    Exit status 1 when less than the whole blocks of the prefix are there.
    """
    prompt = tokens_of(tokens, ids)
    namespace = namespace_of(version, adapter, salt_file)
    with connected(socket) as harbor:
        pinned = harbor.find_pool(pool).warmup_present(prompt, name, ttl_s, namespace=namespace)
    if as_json:
        facts = {"pinned_tokens": pinned.pinned_tokens, "missing_tokens": pinned.missing_tokens}
        typer.echo(json.dumps({**facts, "ttl_s": pinned.ttl_s}))
    else:
        typer.echo(f"{pinned.pinned_tokens} tokens pinned as {name}, {pinned.missing_tokens} missing")
    if pinned.missing_tokens:
        raise typer.Exit(1)


def unwarm(pool: PoolArgument, name: PinArgument, socket: SocketOption = None) -> None:
    """Ends a pin."""
    with connected(socket) as harbor:
        harbor.find_pool(pool).unwarm(name)
