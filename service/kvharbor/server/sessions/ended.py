"""Why the last sessions ended: told to whoever has a token of one, and to nobody else."""

from typing import Final

from kvharbor.server.session_errors import SessionUnknown
from kvharbor.server.sessions.session import Session

MAX_TOKENS: Final = 1024
"""One a process of a session; the oldest are forgotten first, and all of them with the service's process."""


class EndedSessions:
    """The causes by which sessions ended of which nothing is left any more."""

    def __init__(self) -> None:
        self._causes: dict[str, str] = {}

    def add(self, session: Session) -> None:
        """Remembers an ended session by the tokens of its processes."""
        self._causes |= dict.fromkeys((member.token for member in session.members), session.cause)
        for oldest in list(self._causes)[:-MAX_TOKENS]:
            del self._causes[oldest]

    def unknown(self, token: str) -> SessionUnknown:
        """Returns the refusal of a token that is of no session any more, or never was."""
        return SessionUnknown(self._causes.get(token, ""))
