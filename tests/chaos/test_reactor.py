"""The harness's one thread: who is called back."""

import os
from collections.abc import Callable

from chaos.reactor import Reactor


def test_a_new_watch_is_not_told_what_an_ended_one_of_the_same_number_was_ready_for() -> None:
    reactor, told = Reactor(), list[str]()
    pipes = [os.pipe(), os.pipe()]
    for _, end in pipes:
        os.write(end, b"x")

    def replace(number: int) -> Callable[[], None]:
        def ready() -> None:
            told.append(f"pipe {number}")
            for reader, _ in pipes:
                reactor.forget(reader)
            # The other one's number is another descriptor's now, as after a close and an open.
            other = pipes[1 - number][0]
            os.dup2(quiet, other)
            reactor.watch(other, lambda: told.append("the new one"))

        return ready

    quiet, quiet_end = os.pipe()
    for number, (reader, _) in enumerate(pipes):
        reactor.watch(reader, replace(number))
    reactor.run_for(0.05)
    for descriptor in (*pipes[0], *pipes[1], quiet, quiet_end):
        os.close(descriptor)
    assert len(told) == 1, told
