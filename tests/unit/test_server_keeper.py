"""What outlives a process: kept by name, sent in whole messages, with descriptors that belong to their keeper."""

import os
import socket

import pytest

from kvharbor.server.supervision.control import MAX_FDS, MAX_MESSAGE_BYTES, Channel
from kvharbor.server.supervision.keeper import Kept, Unkept

pytestmark = pytest.mark.usefixtures("no_leaks")


def pipe_end() -> int:
    """Returns a descriptor, the caller's to close."""
    reader, writer = os.pipe()
    os.close(writer)
    return reader


def same_file(one: int, other: int) -> bool:
    """Tells whether two descriptors mean one file."""
    return os.path.samestat(os.fstat(one), os.fstat(other))


def test_a_name_keeps_its_descriptors_until_it_gets_new_ones() -> None:
    """S15: the caller's stay its own, and those that are replaced or dropped are closed."""
    keeper = Unkept()
    first, second = pipe_end(), pipe_end()
    keeper.keep("a", {"x": 1}, (first,))
    keeper.keep("a", {"x": 2})
    assert keeper.kept["a"].meta == {"x": 2}
    assert same_file(keeper.kept["a"].fds[0], first)
    keeper.keep("a", {"x": 3}, (second,))
    assert same_file(keeper.kept["a"].fds[0], second)
    keeper.drop("a")
    keeper.drop("a")
    assert keeper.kept == {}
    keeper.keep("b", {}, (first,))
    keeper.close()
    os.close(first)
    os.close(second)


def test_facts_alone_need_no_descriptor() -> None:
    """And are replaced whole."""
    keeper = Unkept()
    keeper.keep("a", {"x": 1, "y": 1})
    keeper.keep("a", {"x": 2})
    assert keeper.kept == {"a": Kept({"x": 2})}


def test_what_was_sent_before_a_death_still_arrives() -> None:
    """S15: in order, with its descriptors, then the end of the stream."""
    ours, theirs = Channel.pair()
    fd = pipe_end()
    theirs.send({"n": 1}, (fd, fd))
    theirs.send({"n": 2})
    os.close(fd)
    theirs.close()
    first = ours.receive()
    assert first is not None
    assert first[0] == {"n": 1}
    assert same_file(*first[1])
    assert not any(os.get_inheritable(received) for received in first[1])
    for received in first[1]:
        os.close(received)
    assert ours.receive() == ({"n": 2}, ())
    assert ours.receive() is None
    ours.close()


def test_a_reader_that_died_with_messages_unread_is_the_end_too() -> None:
    """The kernel calls it a reset."""
    ours, theirs = Channel.pair()
    ours.send({"n": 1})
    theirs.close()
    assert ours.receive() is None
    with pytest.raises(OSError, match="Broken pipe"):
        ours.send({"n": 2})
    ours.close()


def test_what_was_sent_before_a_reset_still_arrives() -> None:
    """S15: the kernel tells of the reset first, and only once."""
    ours, theirs = Channel.pair()
    ours.send({"leave": True})
    theirs.send({"n": 1})
    theirs.send({"n": 2})
    assert ours.receive(flags=socket.MSG_PEEK) == ({"n": 1}, ())
    theirs.close()
    ours.skip()
    assert ours.receive() == ({"n": 2}, ())
    assert ours.receive() is None
    ours.close()


def test_what_is_handed_over_is_still_kept() -> None:
    """And whoever gets it has to close it."""
    keeper, fd = Unkept(), pipe_end()
    keeper.keep("a", {}, (fd,))
    (own,) = keeper.hand_over("a")
    assert same_file(own, fd)
    os.close(own)
    assert same_file(keeper.kept["a"].fds[0], fd)
    keeper.close()
    os.close(fd)


def test_the_largest_message_arrives_whole_and_a_larger_one_is_refused() -> None:
    """A message is never cut off."""
    ours, theirs = Channel.pair()
    fd = pipe_end()
    largest = {"x": "y" * (MAX_MESSAGE_BYTES - len('{"x":""}'))}
    ours.send(largest, (fd,) * MAX_FDS)
    received = theirs.receive()
    assert received is not None
    assert received[0] == largest
    assert len(received[1]) == MAX_FDS
    for each in received[1]:
        os.close(each)
    with pytest.raises(ValueError, match="too large"):
        ours.send({"x": largest["x"] + "y"})
    with pytest.raises(ValueError, match="too large"):
        ours.send({}, (fd,) * (MAX_FDS + 1))
    os.close(fd)
    ours.close()
    theirs.close()


def test_a_full_socket_is_told_to_those_who_may_not_wait() -> None:
    """A heartbeat is dropped then, and the event loop goes on."""
    ours, theirs = Channel.pair()

    def heartbeats() -> None:
        while True:
            ours.send({"alive": True}, flags=socket.MSG_DONTWAIT)

    with pytest.raises(BlockingIOError):
        heartbeats()
    ours.close()
    theirs.close()
