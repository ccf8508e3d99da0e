"""Who is tried next when an Allocate has to wait for room.

First come first served per tenant. A smaller request may pass a blocked head until that has waited half its
time; from then on the room that becomes free gathers for the head. A waiter holds nothing.
"""

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Ticket:
    """One waiting request. `needed_blocks` is what its last attempt lacked; the caller keeps it up to date."""

    tenant: str
    needed_blocks: int
    enqueued_at: float
    deadline: float

    def is_impatient(self, now: float) -> bool:
        """Whether it has waited half its time, so that nobody may pass it any more."""
        return now - self.enqueued_at >= (self.deadline - self.enqueued_at) / 2


class AdmissionQueue:
    """Waiting requests of one pool, in order of arrival. Synchronous, no clock."""

    def __init__(self) -> None:
        self._tickets: OrderedDict[Ticket, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._tickets)

    def enqueue(self, tenant: str, needed_blocks: int, now: float, deadline: float) -> Ticket:
        """Adds a request that has just failed for want of `needed_blocks`."""
        ticket = Ticket(tenant, needed_blocks, now, deadline)
        self._tickets[ticket] = None
        return ticket

    def discard(self, ticket: Ticket) -> None:
        """Takes a request out: served, given up or timed out. Repeating it is nothing."""
        self._tickets.pop(ticket, None)

    def may_pass(self, tenant: str, now: float) -> bool:
        """Whether a newcomer of this tenant may be tried before those who wait."""
        head = next((ticket for ticket in self._tickets if ticket.tenant == tenant), None)
        return head is None or not head.is_impatient(now)

    def candidates(self, available_blocks: int, now: float) -> list[Ticket]:
        """Returns those that may fit, in the order to try them; ask again after each that is served."""
        heads: set[str] = set()
        gathering: set[str] = set()
        fitting = []
        for ticket in self._tickets:
            fits = ticket.needed_blocks <= available_blocks
            if ticket.tenant not in heads:
                heads.add(ticket.tenant)
                if not fits and ticket.is_impatient(now):
                    gathering.add(ticket.tenant)
            if fits and ticket.tenant not in gathering:
                fitting.append(ticket)
        return fitting
