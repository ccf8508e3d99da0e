"""AdmissionQueue: first come first served, and when a smaller request may pass."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from kvharbor.pool.waiting import AdmissionQueue, Ticket


def test_the_first_to_come_is_the_first_to_be_tried() -> None:
    """Those that fit are tried in order of arrival, whichever tenant they are of."""
    queue = AdmissionQueue()
    tickets = [queue.enqueue(tenant, 2, now, 100.0) for tenant, now in (("t", 0.0), ("u", 1.0), ("t", 2.0))]
    assert queue.candidates(2, 3.0) == tickets
    assert queue.candidates(1, 3.0) == []


def test_a_smaller_one_may_pass_until_the_head_has_waited_half_its_time() -> None:
    """Then the room gathers for the head: nobody of its tenant passes, waiting or new."""
    queue = AdmissionQueue()
    big = queue.enqueue("t", 10, now=0.0, deadline=8.0)
    small = queue.enqueue("t", 1, now=1.0, deadline=100.0)
    assert queue.candidates(3, 3.9) == [small]
    assert queue.may_pass("t", 3.9)
    assert queue.candidates(3, 4.0) == []
    assert not queue.may_pass("t", 4.0)
    assert queue.candidates(10, 4.0) == [big, small]


def test_an_impatient_head_holds_up_its_own_tenant_only() -> None:
    """[G8] One tenant's blocked head does not starve another tenant."""
    queue = AdmissionQueue()
    queue.enqueue("t", 10, now=0.0, deadline=2.0)
    other = queue.enqueue("u", 1, now=0.5, deadline=50.0)
    assert queue.candidates(3, 5.0) == [other]
    assert queue.may_pass("u", 5.0)


def test_the_next_in_line_becomes_the_head() -> None:
    """Once the head is gone, the next one's patience counts, from its own arrival."""
    queue = AdmissionQueue()
    first = queue.enqueue("t", 10, now=0.0, deadline=2.0)
    second = queue.enqueue("t", 5, now=4.0, deadline=14.0)
    third = queue.enqueue("t", 1, now=4.0, deadline=100.0)
    queue.discard(first)
    assert queue.candidates(3, 5.0) == [third]
    assert queue.candidates(3, 9.0) == []
    assert queue.candidates(5, 9.0) == [second, third]


def test_a_ticket_can_be_discarded_again() -> None:
    """Served, given up and timed out at the same moment are one end."""
    queue = AdmissionQueue()
    ticket = queue.enqueue("t", 1, 0.0, 1.0)
    queue.discard(ticket)
    queue.discard(ticket)
    assert len(queue) == 0
    assert queue.may_pass("t", 100.0)


def test_a_first_claim_goes_before_all_who_have_none() -> None:
    """Whenever it has come, and also where one without would fit and it does not."""
    queue = AdmissionQueue()
    rich = queue.enqueue("t", 1, 0.0, 100.0)
    poor = queue.enqueue("t", 4, 1.0, 100.0)
    poor.has_first_claim = True
    assert queue.candidates(4, 2.0) == [poor, rich]
    assert queue.candidates(3, 2.0) == []
    assert not queue.may_pass("t", 2.0)
    assert not queue.may_pass("u", 2.0)
    assert queue.may_pass("t", 2.0, has_first_claim=True)
    assert not queue.may_pass("t", 60.0, has_first_claim=True)


def test_a_newcomer_with_a_first_claim_passes_an_impatient_head_that_has_none() -> None:
    """What the head gathers room for is more than its session is guaranteed."""
    queue = AdmissionQueue()
    queue.enqueue("t", 10, 0.0, 2.0)
    assert not queue.may_pass("t", 1.5)
    assert queue.may_pass("t", 1.5, has_first_claim=True)


@dataclass
class NaiveTicket:
    """What the naive queue knows of one."""

    ticket: Ticket
    tenant: str
    needed: int
    enqueued_at: float
    deadline: float
    is_first: bool


def naive_candidates(waiting: list[NaiveTicket], available: int, now: float) -> list[Ticket]:
    """Says for each, by itself, whether it may be tried, straight from the rules."""
    found = []
    for is_first in (True, False):
        for index, one in enumerate(waiting):
            if one.is_first is not is_first or one.needed > available:
                continue
            if not is_first and any(other.is_first and other.needed > available for other in waiting):
                continue
            head = next(each for each in waiting if each.is_first is is_first and each.tenant == one.tenant)
            half = head.enqueued_at + (head.deadline - head.enqueued_at) / 2
            if index == waiting.index(head) or head.needed <= available or now < half:
                found.append(one.ticket)
    return found


@given(
    asked=st.lists(
        st.tuples(st.sampled_from("tu"), st.integers(0, 8), st.integers(0, 20), st.integers(1, 40), st.booleans()),
        max_size=8,
    ),
    available=st.integers(0, 8),
    now=st.integers(20, 60),
)
def test_the_queue_is_as_the_rules_say(asked: list[tuple[str, int, int, int, bool]], available: int, now: int) -> None:
    """Against a model that looks at each waiter by itself."""
    queue = AdmissionQueue()
    waiting = []
    for tenant, needed, arrival, patience, is_first in sorted(asked, key=lambda one: one[2]):
        ticket = queue.enqueue(tenant, needed, float(arrival), float(arrival + patience))
        ticket.has_first_claim = is_first
        waiting.append(NaiveTicket(ticket, tenant, needed, arrival, arrival + patience, is_first))
    assert queue.candidates(available, float(now)) == naive_candidates(waiting, available, now)
