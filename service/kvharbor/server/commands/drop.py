"""`kvharbor drop`: gives a pool's memory back."""

import typer

from kvharbor.server.commands.options import PoolArgument, SocketOption, connected


def drop(pool: PoolArgument, socket: SocketOption = None) -> None:
    """Removes a pool and what is cached in it. Refused while a session has it open or it has warm pins."""
    with connected(socket) as harbor:
        harbor.find_pool(pool)
        harbor.drop_pool(pool)
    typer.echo(f"pool {pool} dropped")
