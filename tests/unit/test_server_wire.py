"""Messages and values say the same."""

import pytest
from google.protobuf import duration_pb2

from kvharbor.gpumem import BlockOrder, DataType, Layout, LayoutInvalid
from kvharbor.pool import Shadow
from kvharbor.pool.errors import InvalidField
from kvharbor.server.messages.layouts import identity_of, layout_message, layout_of
from kvharbor.server.messages.wire import (
    duration_message,
    held_of,
    integers,
    little_endian,
    prompt_of,
    put_shadows,
    seconds_of,
)
from kvharbor.v1 import cache_service_pb2 as cache_pb
from kvharbor.v1 import types_pb2


@pytest.mark.parametrize("data_type", list(DataType))
@pytest.mark.parametrize("order", list(BlockOrder))
def test_a_layout_comes_back_as_it_went(data_type: DataType, order: BlockOrder) -> None:
    """Every element type and both orders have a number on the wire."""
    layout = Layout.attention("m", 2, 4, 32, data_type, 64, order=order, tp_size=2, scratch_blocks=2)
    assert layout_of(layout_message(layout)) == layout


def test_a_number_that_the_service_does_not_know_is_refused_by_field() -> None:
    """Enums grow: a newer client's value is no default here."""
    message = layout_message(Layout.attention("m", 2, 4, 32, DataType.FLOAT16))
    message.planes[1].data_type = 99  # type: ignore[assignment]
    with pytest.raises(LayoutInvalid, match=r"planes\.v\.data_type is 99"):
        layout_of(message)
    message.planes[1].data_type = types_pb2.DATA_TYPE_FLOAT16
    message.order = types_pb2.BLOCK_ORDER_UNSPECIFIED
    with pytest.raises(LayoutInvalid, match="order is 0"):
        layout_of(message)


def test_the_place_of_pages_is_no_part_of_a_digest() -> None:
    """Order and scratch blocks say where bytes lie, not what they mean."""
    one = Layout.attention("m", 2, 4, 32, DataType.FLOAT16, order=BlockOrder.LAYER_MAJOR, scratch_blocks=1)
    two = Layout.attention("m", 2, 4, 32, DataType.FLOAT16, order=BlockOrder.BLOCK_MAJOR, scratch_blocks=2)
    assert identity_of(one) == identity_of(two)
    assert identity_of(one) != identity_of(Layout.attention("n", 2, 4, 32, DataType.FLOAT16))


def test_integers_are_little_endian_both_ways() -> None:
    """And bytes that are no whole number of them are refused."""
    assert little_endian("I", [1, 2**32 - 1]) == b"\x01\x00\x00\x00\xff\xff\xff\xff"
    assert list(integers("generations", "Q", b"\x02" + bytes(7))) == [2]
    with pytest.raises(InvalidField, match="generations is 9 bytes long"):
        integers("generations", "Q", bytes(9))


def test_durations_keep_their_milliseconds_and_their_bounds() -> None:
    """Ten years are enough for anybody; below the least is no time."""
    assert seconds_of("ttl", duration_message(1.5)) == 1.5
    for seconds in (-1, 10 * 366 * 86400, 2**63 - 1):
        with pytest.raises(InvalidField, match="ttl is"):
            seconds_of("ttl", duration_pb2.Duration(seconds=seconds))
    with pytest.raises(InvalidField, match=r"must be 0\.001 s to ten years"):
        seconds_of("ttl", duration_pb2.Duration(nanos=1), least_s=0.001)


@pytest.mark.parametrize("request_type", [cache_pb.AllocateRequest, cache_pb.LookupRequest, cache_pb.WarmupRequest])
def test_calls_about_tokens_take_no_opaque_namespace(
    request_type: type[cache_pb.AllocateRequest | cache_pb.LookupRequest | cache_pb.WarmupRequest],
) -> None:
    """A namespace is exact or opaque, never both: tokens say nothing where blocks are known by opaque keys."""
    request = request_type(token_ids=bytes(4), namespace=types_pb2.NamespaceKey(version="v", scheme="engine/sha256"))
    with pytest.raises(InvalidField, match=r"namespace\.scheme is .*use block calls"):
        prompt_of(request)
    request.namespace.scheme = ""
    assert prompt_of(request).version == "v"


def test_a_sequence_is_resumed_in_an_exact_namespace() -> None:
    """As it was allocated in one."""
    with pytest.raises(InvalidField, match=r"namespace\.scheme is"):
        held_of(cache_pb.HeldSequence(namespace=types_pb2.NamespaceKey(scheme="engine/sha256")), 1)


def test_many_shadows_are_put_in_slices() -> None:
    """[S14] A commit of a hundred thousand blocks that others have published has as many."""
    shadows = [Shadow(position, position + 1, 1) for position in range(10_000)]
    result = cache_pb.CommitResult()
    assert sum(1 for _ in put_shadows(result.shadows, shadows)) >= 9
    assert [one.position for one in result.shadows] == list(range(10_000))
