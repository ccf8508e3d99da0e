"""Block calls against a real service: what one session publishes another holds."""

import os
import threading

import pytest

from integration.client_worker import BLOCK_TOKENS, LAYOUT, pool_size
from integration.pool_content import classes
from integration.published_chains import NAMES, SPACE, admit, both, keys, publish, release
from kvharbor.client import BlockHeld, BlockNotHeld, Chain, CommitChain, Credits, Harbor, HarborClosed, connect
from service_process import DEADLINE_S
from waiting import until


def test_what_one_session_publishes_another_holds(harbors: list[Harbor]) -> None:
    """Also while the first has it; released by both it is cached, and bytes are those that were written."""
    one, other = both(harbors, 16)
    named = keys("shared", 3)
    first = admit(one, named, 4)
    assert (len(first.held), len(first.leased)) == (0, 4)
    one.blocks.flush()
    second = admit(other, named, 4)
    assert ([*second.held], len(second.leased)) == ([*first.leased[:3]], 1)
    seen = other.views.numpy("k", 0)[second.held.block_ids][:, 0, 0, 0]
    assert seen.tolist() == [key[0] for key in named]
    assert classes(one) == (11, 2, 3, 0)
    for pool, got in ((one, first), (other, second)):
        release(pool, got)
        pool.blocks.flush()
        assert len(pool.own_blocks) == 0
    assert classes(one) == (13, 0, 0, 3)


def test_a_chain_stands_back_for_another_session(harbors: list[Harbor]) -> None:
    """[W8] Nothing is held of it and nobody counts it, until it is given what the other has published."""
    one, other = both(harbors, 16)
    named = keys("stands back", 2)
    chain = Chain(keys=b"".join(named), namespace=SPACE, table_block_count=3, computes=True, unless_pending=True)
    (first,), (second,) = one.blocks.acquire([chain]), other.blocks.acquire([chain], wait_s=5.0)
    assert (first.stands_back, second.stands_back) == (False, True)
    assert (second.grant, second.refusal, len(other.own_blocks)) == (None, None, 0)
    assert one.stats().counters.prompt_token_count == 2 * BLOCK_TOKENS
    publish(one, named, first)
    one.blocks.flush()
    (second,) = other.blocks.acquire([chain])
    assert (second.stands_back, len(second.held), len(second.leased)) == (False, 2, 1)
    assert one.stats().counters.prompt_token_count == 4 * BLOCK_TOKENS
    for pool, got in ((one, first), (other, second)):
        release(pool, got)
        pool.blocks.flush()


def test_content_that_is_there_already_is_kept_by_its_session_alone(harbors: list[Harbor]) -> None:
    """Both compute the same at the same time: the second copy is a shadow until it is released."""
    one, other = both(harbors, 16)
    named = keys("twice", 2)
    chain = Chain(keys=b"".join(named), namespace=SPACE, table_block_count=2, computes=True)
    (first,), (second,) = one.blocks.acquire([chain]), other.blocks.acquire([chain])
    assert second.pending is not None
    assert (second.pending.token_count, second.pending.session_id) == (2 * BLOCK_TOKENS, harbors[0].session_id)
    publish(one, named, first)
    one.blocks.flush()
    publish(other, named, second)
    other.blocks.flush()
    assert classes(one)[1:] == (0, 4, 0)
    release(other, second)
    other.blocks.flush()
    assert classes(one)[1:] == (0, 2, 0)
    release(one, first)
    one.blocks.flush()
    assert classes(one) == (14, 0, 0, 2)


def test_tokens_are_found_by_block_calls_and_by_sequences(harbors: list[Harbor]) -> None:
    """One index: what an engine with tables of its own publishes by tokens, a sequence reuses, and the other way."""
    one, other = both(harbors, 16)
    leased = one.blocks.lease(2, 2).blocks
    one.blocks.commit([CommitChain(blocks=leased, tokens=range(32))])
    one.blocks.flush()
    with other.allocate(range(50)) as sequence:
        assert (sequence.cached_tokens, sequence.table[:2].tolist()) == (32, leased.block_ids.tolist())
        sequence.commit(50)
        (got,) = one.blocks.acquire([Chain(tokens=range(48))])
        assert got.held.block_ids.tolist() == sequence.table[:3].tolist()


def test_a_refused_commit_changes_nothing(harbors: list[Harbor]) -> None:
    """A block that the session does not hold; the next chain of the call is taken all the same."""
    one, other = both(harbors, 16)
    theirs, ours = other.blocks.lease(1, 1).blocks, one.blocks.lease(1, 1).blocks
    chains = [
        CommitChain(blocks=blocks, keys=key, namespace=SPACE)
        for blocks, key in zip((theirs, ours), keys("no", 2), strict=True)
    ]
    one.blocks.commit(chains)
    with pytest.raises(BlockNotHeld):
        one.blocks.flush()
    assert classes(one)[1:3] == (1, 1)


def test_wrong_bytes_are_taken_back(harbors: list[Harbor]) -> None:
    """Not under another who holds them: the namespace's version is for that."""
    one, other = both(harbors, 16)
    named = keys("wrong", 2)
    got = admit(one, named, 2)
    one.blocks.flush()
    held = admit(other, named, 2)
    (refusal, _) = one.blocks.invalidate(got.leased).refusals
    assert isinstance(refusal, BlockHeld)
    release(other, held)
    other.blocks.flush()
    taken_back = one.blocks.invalidate(got.leased[:1])
    assert (taken_back.refusals, len(taken_back.leased)) == ((None,), 2)
    assert {*one.own_blocks.all()} == {*taken_back.leased}
    assert classes(one) == (14, 2, 0, 0)
    assert len(admit(other, named, 2).held) == 0


def test_a_version_of_the_weights_separates(harbors: list[Harbor]) -> None:
    """What runs keeps its namespace; what comes next finds nothing of the old version."""
    one, other = both(harbors, 32)
    named = keys("version", 2)
    release(one, admit(one, named, 2))
    with one.allocate(range(32)) as running:
        one.blocks.bump_namespace("v2")
        assert len(admit(one, named, 2).held) == 0
        assert len(admit(other, named, 2).held) == 2
        running.commit(32)
        assert other.lookup(range(32)).present_tokens == 32
        assert one.lookup(range(32)).present_tokens == 0


def test_the_status_page_is_as_the_statistics_are(harbors: list[Harbor]) -> None:
    """Read without a call, also after the other session's changes."""
    one, other = both(harbors, 16)
    page = one.blocks.status
    assert page.epoch == int(harbors[0].epoch, 16)
    assert page.available_block_count == 16
    before = page.revision
    got = admit(other, keys("page", 2), 5)
    other.blocks.flush()
    assert page.revision > before
    assert page.available_block_count == 11
    release(other, got)
    other.blocks.flush()
    stats = one.stats()
    assert page.available_block_count == stats.free_block_count + stats.cached_block_count == 16
    assert page is one.blocks.status


def test_a_status_page_ends_with_its_harbor(harbor: str) -> None:
    """It is unmapped, and reading it is an error and no crash."""
    with connect(harbor) as opened:
        page = opened.open_pool(f"blocks-{next(NAMES)}", LAYOUT, pool_size(4)).blocks.status
    with pytest.raises(HarborClosed):
        _ = page.available_block_count


def test_a_fork_has_no_part_in_the_stream(harbor: str) -> None:
    """C7: the child's calls say so at once, and the parent's stream goes on."""
    with connect(harbor) as opened:
        pool = opened.open_pool(f"blocks-{next(NAMES)}", LAYOUT, pool_size(8))
        leased = pool.blocks.lease(2, 2).blocks
        credits = Credits(pool, 1)
        sending, forked = threading.Event(), threading.Event()

        def send() -> None:
            """Has the lock of what is sent, as its thread may have at any moment."""
            with pool.link.stream._outbox.paused():
                sending.set()
                forked.wait(DEADLINE_S)

        sender = threading.Thread(target=send)
        sender.start()
        assert sending.wait(DEADLINE_S)
        child = os.fork()
        if not child:
            status = 1
            try:
                pool.blocks.release(leased)
            except HarborClosed:
                credits.close()
                opened.close()
                status = 0
            os._exit(status)
        forked.set()
        sender.join(DEADLINE_S)
        assert os.waitpid(child, 0)[1] == 0
        credits.close()
        pool.blocks.release(leased)
        pool.blocks.flush()
        until(lambda: not len(pool.own_blocks))
