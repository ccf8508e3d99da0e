"""`kvharbor drop`: gives a pool's memory back."""

import typer

from kvharbor.server.commands.options import PoolArgument, SocketOption, TenantOption, connected


def drop(pool: PoolArgument, tenant: TenantOption = None, socket: SocketOption = None) -> None:
    """Removes a pool and what is cached in it. Refused while a session has it open or it has warm pins."""
    with connected(socket) as harbor:
        owner = harbor.find_pool(pool, tenant).tenant
        harbor.drop_pool(pool, owner)
    typer.echo(f"pool {pool} of tenant {owner} dropped")
