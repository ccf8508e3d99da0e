"""AdmissionQueue: first come first served, and when a smaller request may pass."""

from kvharbor.pool.waiting import AdmissionQueue


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
