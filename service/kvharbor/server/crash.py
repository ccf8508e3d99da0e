"""The end of a process that no longer knows its state."""

import os

import structlog

from kvharbor.server.restarts import EXIT_BUG

log = structlog.get_logger(__name__)


def crash(failure: BaseException) -> None:
    """Logs what broke and ends the process at once: an owner that does not know its state must not go on [S12]."""
    log.critical("the pool is broken, the process ends", exc_info=failure)
    os._exit(EXIT_BUG)
