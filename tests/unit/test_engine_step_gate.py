"""Who waits for the end of a step is through before the next one begins."""

import threading

from kvharbor.engines.step_gate import StepGate
from waiting import until


def test_a_step_that_begins_at_once_lets_in_who_waits() -> None:
    """However soon it comes: an engine's loop has nothing else to do."""
    gate = StepGate()
    for _ in range(20):
        waiter = threading.Thread(target=gate.wait_for_end)
        with gate.step():
            waiter.start()
            until(lambda: gate._waiting == 1)
        with gate.step():
            assert gate._waiting == 0
        waiter.join()
