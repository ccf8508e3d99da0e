"""How the service stands to this process: there, away, coming back, or gone for good [C11]. No I/O and no lock."""

import copy
import enum
import time

from kvharbor.client.errors import EpochEnded, HarborError, ServiceAway, SessionLost, StaleEpoch


class State(enum.Enum):
    """What calls do: PRESENT send, AWAY wait or are taken in here, RETURNING wait, ENDED fail."""

    PRESENT = enum.auto()
    AWAY = enum.auto()
    RETURNING = enum.auto()
    ENDED = enum.auto()


class Standing:
    """One link's view of the service. Its owner changes and reads it from one thread at a time.

    `life` rises whenever the next process is told what this one holds: an answer to what was sent before must not
    be taken in after it, as the next process does not know of it. `epochs` rises when all that was held is void.
    `deserted`: nobody listens any more, so that the session is over already; who is `closing` need not wait then.
    """

    def __init__(self, address: str) -> None:
        self.state = State.PRESENT
        self.life = 0
        self.epochs = 0
        self.deserted = False
        self.closing = False
        self._address = address
        self._away_since_s = 0.0
        self._ended_by: HarborError | None = None

    def leave(self) -> None:
        """The service's process has ended."""
        if self.state is State.PRESENT:
            self._away_since_s = time.monotonic()
        if self.state is not State.ENDED:
            self.state = State.AWAY

    def desert(self) -> None:
        """Nobody listens any more."""
        self.deserted = True

    def begin_return(self) -> None:
        """The next process is told what is held here, as it is now."""
        if self.state is not State.ENDED:
            self.life += 1
            self.state = State.RETURNING

    def begin_epoch(self) -> None:
        """All that was held is void."""
        self.epochs += 1
        self.begin_return()

    def arrive(self) -> None:
        """The next process knows all."""
        self.deserted = False
        if self.state is not State.ENDED:
            self.state = State.PRESENT

    def end(self, cause: HarborError) -> None:
        """Every later call raises `cause`; the first one counts."""
        if self.state is not State.ENDED:
            self.state = State.ENDED
            self.life += 1
            self._ended_by = cause

    def settled(self, *, even_away: bool) -> bool:
        """Whether a call need not wait; `even_away` for one that can be taken in here."""
        if self.state is State.AWAY and (even_away or (self.closing and self.deserted)):
            return True
        return self.state in (State.PRESENT, State.ENDED)

    def news_since(self, life: int) -> bool:
        """Whether the process that was there in `life` is known to have ended."""
        return self.life != life or self.state is not State.PRESENT

    def require(self, epochs: int) -> None:
        """Raises what the harbor has ended by, and EpochEnded for a call that was made when `epochs` was less."""
        if self._ended_by is not None:
            raise copy.copy(self._ended_by)
        if self.closing and self.deserted:
            raise SessionLost(f"the service at {self._address} has ended, and the session with it")
        if self.epochs != epochs:
            raise EpochEnded(f"the service at {self._address} has a new epoch since the call was made: start over")

    def meant(self, error: HarborError) -> HarborError:
        """Returns EpochEnded for the refusal of a handle that an epoch took with it while its call was being made."""
        if isinstance(error, StaleEpoch) and self.epochs:
            return EpochEnded(str(error), metadata=error.metadata)
        return error

    def still_away(self) -> ServiceAway:
        """Returns the error for a call that has waited long enough."""
        away_s = time.monotonic() - self._away_since_s
        return ServiceAway(
            f"the service at {self._address} has been away for {away_s:.3f} s: try again, or wait longer "
            f"(timeout_s, away_wait_s)",
            metadata={"address": self._address, "awayS": f"{away_s:.3f}"},
        )
