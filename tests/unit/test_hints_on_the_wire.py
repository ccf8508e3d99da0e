"""Hints from the client's words to the pool's, and what becomes of absurd ones."""

import pytest

from kvharbor.client import BlockRun, CommitChain, ExpectedReuse, Hints, InvalidField, connect
from kvharbor.client.hints import hints_message
from kvharbor.client.runs import NO_BLOCKS
from kvharbor.gpumem import DataType, Layout
from kvharbor.pool import ExpectedReuse as PoolReuse
from kvharbor.pool import Hints as PoolHints
from kvharbor.pool.hints import NO_HINTS
from kvharbor.server.messages.blocks import chain_of
from kvharbor.server.messages.wire import prompt_of
from kvharbor.v1 import blocks_pb2
from kvharbor.v1 import cache_service_pb2 as cache

LAYOUT = Layout.attention("hints", layers=1, kv_heads=1, head_dim=2, data_type=DataType.FLOAT16, block_tokens=16)
GIVEN = Hints(priority=-3, retention_s=1.5, expected_reuse=ExpectedReuse.MUCH)
MEANT = PoolHints(priority=-3, retention_s=1.5, expected_reuse=PoolReuse.MUCH)


def test_an_allocate_carries_what_its_caller_has_said() -> None:
    """Each of the three, and nothing if nothing was said."""
    request = cache.AllocateRequest(token_ids=bytes(4), hints=hints_message(GIVEN))
    assert prompt_of(request).hints == MEANT
    assert hints_message(Hints()) is None
    assert prompt_of(cache.AllocateRequest(token_ids=bytes(4))).hints == NO_HINTS
    assert prompt_of(cache.LookupRequest(token_ids=bytes(4))).hints == NO_HINTS


def test_a_commit_of_blocks_carries_them_too() -> None:
    """It is what publishes; a chain to acquire has none."""
    message = CommitChain(blocks=NO_BLOCKS, keys=bytes(32), hints=GIVEN).message("")
    assert chain_of(message, "").hints == MEANT
    assert chain_of(CommitChain(blocks=BlockRun.join([]), keys=bytes(32)).message(""), "").hints == NO_HINTS
    assert chain_of(blocks_pb2.BlockChain(keys=bytes(32)), "").hints == NO_HINTS


@pytest.mark.parametrize("word", [4, 2**31 - 1, -1])
def test_a_word_of_a_later_version_says_nothing(word: int) -> None:
    """Hints may only help: a newer client is served."""
    request = cache.AllocateRequest(token_ids=bytes(4))
    request.hints.expected_reuse = word  # type: ignore[assignment]
    assert prompt_of(request).hints == PoolHints()


def test_absurd_hints_are_a_callers_mistake(harbor: str) -> None:
    """Told by field, and nothing stays held; sensible ones are served."""
    with connect(harbor) as connection:
        pool = connection.open_pool("hints", LAYOUT, 9 * LAYOUT.block_bytes)
        with pool.allocate(range(16), hints=GIVEN) as sequence:
            sequence.commit(16)
        for absurd in (Hints(priority=1_000), Hints(retention_s=1e9), Hints(retention_s=-1.0)):
            with pytest.raises(InvalidField) as refused:
                pool.allocate(range(16), hints=absurd)
            assert refused.value.metadata["field"].startswith("hints.")
        assert pool.stats().sequence_count == 0
        pool.allocate(range(16), hints=Hints(retention_s=3_600)).release()
