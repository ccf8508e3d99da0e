"""What others are computing."""

from dataclasses import dataclass
from typing import Final

PATIENCE_S: Final = 2.0
"""The service has nobody wait for a session that was not heard of for so long."""


@dataclass(frozen=True, slots=True)
class Pending:
    """Tokens of a prompt, right behind its cached ones, that another session is computing; as of the allocate.

    `session_id` is as in `Harbor.list_sessions`, empty while the sequence is handed off. For `idle_s` it has committed
    nothing, nor said that it is at work.
    """

    token_count: int
    session_id: str
    idle_s: float

    @property
    def has_stalled(self) -> bool:
        """Whether nobody waits for it any more."""
        return self.idle_s >= PATIENCE_S
