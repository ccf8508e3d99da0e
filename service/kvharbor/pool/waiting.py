"""Who is tried next when a request has to wait for room.

First come first served per tenant. A smaller request may pass a blocked head until that has waited half its
time; from then on the room that becomes free gathers for the head. A waiter holds nothing.

Before all of them go those with a first claim: their sessions have less than each is guaranteed. Among themselves
the same holds; while one of them is blocked, nobody without such a claim is tried.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Ticket:
    """One waiting request. `needed_blocks` is what its last attempt lacked; the caller keeps it up to date.

    So it does `has_first_claim`: whether its session has less than it is guaranteed.
    """

    tenant: str
    needed_blocks: int
    enqueued_at: float
    deadline: float
    has_first_claim: bool = False

    def is_impatient(self, now: float) -> bool:
        """Whether it has waited half its time, so that nobody of its kind may pass it any more."""
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

    def may_pass(self, tenant: str, now: float, *, has_first_claim: bool = False) -> bool:
        """Whether a newcomer of this tenant may be tried before those who wait."""
        if not has_first_claim and any(ticket.has_first_claim for ticket in self._tickets):
            return False
        alike = (ticket for ticket in self._tickets if ticket.has_first_claim is has_first_claim)
        head = next((ticket for ticket in alike if ticket.tenant == tenant), None)
        return head is None or not head.is_impatient(now)

    def heads(self) -> list[Ticket]:
        """Returns the next in line of each tenant and kind."""
        found: dict[tuple[str, bool], Ticket] = {}
        for ticket in self._tickets:
            found.setdefault((ticket.tenant, ticket.has_first_claim), ticket)
        return list(found.values())

    def candidates(self, available_blocks: int, now: float) -> list[Ticket]:
        """Returns those that may fit, in the order to try them; ask again after each that is served or cannot pass."""
        first = [ticket for ticket in self._tickets if ticket.has_first_claim]
        fitting = _fitting(first, available_blocks, now)
        if all(ticket.needed_blocks <= available_blocks for ticket in first):
            fitting += _fitting(
                [ticket for ticket in self._tickets if not ticket.has_first_claim], available_blocks, now
            )
        return fitting


def _fitting(tickets: Iterable[Ticket], available_blocks: int, now: float) -> list[Ticket]:
    """Returns those of one kind that may be tried, in order of arrival."""
    heads: set[str] = set()
    gathering: set[str] = set()
    fitting = []
    for ticket in tickets:
        fits = ticket.needed_blocks <= available_blocks
        if ticket.tenant not in heads:
            heads.add(ticket.tenant)
            if not fits and ticket.is_impatient(now):
                gathering.add(ticket.tenant)
        if fits and ticket.tenant not in gathering:
            fitting.append(ticket)
    return fitting
