"""The end of a process that no longer knows its state, or whose state is gone."""

import os
from collections.abc import Callable
from typing import NoReturn

import structlog

from kvharbor.server.supervision.keeper import Keeper
from kvharbor.server.supervision.restarts import EXIT_BUG

log = structlog.get_logger(__name__)

EXIT_FAILED = 1
"""Exit status of a process that can do nothing for its failure; EXIT_BUG would count as broken."""

Crash = Callable[[BaseException], None]
"""Ends the process, as an owner that no longer knows its state must not go on [S12]. Does not return."""


def crash(failure: BaseException) -> None:
    """Logs what broke and ends the process at once: an owner that does not know its state must not go on [S12]."""
    log.critical("the pool is broken, the process ends", exc_info=failure)
    os._exit(EXIT_BUG)


def end_cold(keeper: Keeper, cause: str) -> NoReturn:
    """Drops all that is kept and ends the process: the next one begins anew, in a new epoch.

    For memory that is gone, or whose ledger this version cannot read. Handles of this epoch must not lead anybody to
    what takes its place.
    """
    log.critical("the memory of pools is lost, the next start is cold", cause=cause)
    for name in [*keeper.kept]:
        keeper.drop(name)
    os._exit(EXIT_FAILED)
