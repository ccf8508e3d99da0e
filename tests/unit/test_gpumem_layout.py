"""Layouts: what may be laid out, how two of them differ, and where every page lies."""

import dataclasses
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvharbor.gpumem import (
    TOKEN_HEAD_DIM,
    ArenaTooSmall,
    BlockOrder,
    DataType,
    Descriptor,
    Layout,
    LayoutInvalid,
    LayoutMismatch,
    OutOfBounds,
    Plane,
    PlaneUnknown,
    block_count_for,
)

SMOLLM2 = Layout.attention("smollm2", 30, 3, 64, DataType.FLOAT32)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Up to five opaque planes of one to three layers, so that groups of planes both form and repeat."""
    count = draw(st.integers(1, 5))
    planes = tuple(
        Plane(f"p{i}", draw(st.integers(1, 3)), DataType.UINT8, 16 * draw(st.integers(1, 4)), interior="opaque")
        for i in range(count)
    )
    order, scratch_blocks = draw(st.sampled_from(BlockOrder)), draw(st.integers(0, 2))
    return Layout("m", 16, planes, order=order, scratch_blocks=scratch_blocks)


def pages(descriptor: Descriptor) -> list[tuple[int, int]]:
    """Start and end of every page, in order of address."""
    return sorted(
        (start, start + span.plane.page_bytes)
        for span in descriptor.spans
        for layer in range(span.plane.layer_count)
        for block in range(descriptor.block_count)
        for start in [descriptor.page_offset_bytes(span.plane.name, layer, block)]
    )


@given(layouts(), st.integers(1, 4))
def test_pages_fill_the_arena_without_gap_or_overlap(layout: Layout, usable_blocks: int) -> None:
    """Every (plane, layer, block) has bytes of its own within the size, and no byte belongs to none."""
    descriptor = layout.descriptor(layout.scratch_blocks + usable_blocks)
    edges = pages(descriptor)
    assert [start for start, _ in edges] == [0] + [end for _, end in edges[:-1]]
    assert edges[-1][1] == descriptor.size_bytes


@given(layouts(), st.integers(1, 4))
def test_neighbouring_blocks_touch_in_layer_major_and_a_block_is_one_range_in_block_major(
    layout: Layout, usable_blocks: int
) -> None:
    """Long runs in one order, one memcpy a block in the other."""
    descriptor = layout.descriptor(layout.scratch_blocks + usable_blocks)
    for span in descriptor.spans:
        if layout.order is BlockOrder.LAYER_MAJOR:
            assert span.block_stride_bytes == span.plane.page_bytes
        else:
            assert span.block_stride_bytes == layout.block_bytes
            assert span.offset_bytes + span.plane.page_bytes <= layout.block_bytes


@given(layouts(), st.integers(0, 2000))
def test_a_size_gives_the_most_blocks_that_fit(layout: Layout, size_bytes: int) -> None:
    """Rounded down to whole blocks; less than one usable block is an error that names the least size."""
    least_bytes = (layout.scratch_blocks + 1) * layout.block_bytes
    if size_bytes < least_bytes:
        with pytest.raises(ArenaTooSmall, match=f"less than one block .* at least {least_bytes} bytes"):
            block_count_for(size_bytes, layout)
    else:
        block_count = block_count_for(size_bytes, layout)
        assert block_count * layout.block_bytes <= size_bytes < (block_count + 1) * layout.block_bytes


@pytest.mark.parametrize(
    ("order", "shape"),
    [(BlockOrder.LAYER_MAJOR, "[L, 2, B, P, H, D]"), (BlockOrder.BLOCK_MAJOR, "[B, L, 2, P, H, D]")],
)
def test_attention_has_the_documented_shape(order: BlockOrder, shape: str) -> None:
    """The strides of K and V are those of one contiguous array of the documented axes."""
    sizes = {"L": 5, "2": 2, "B": 7, "P": 16, "H": 3, "D": 8}
    descriptor = Layout.attention("m", 5, 3, 8, DataType.FLOAT16, 16, order=order).descriptor(7)
    strides, stride_bytes = {}, 2
    for axis in reversed(shape.strip("[]").split(", ")):
        strides[axis] = stride_bytes
        stride_bytes *= sizes[axis]
    assert descriptor.size_bytes == stride_bytes
    for index, name in enumerate(["k", "v"]):
        span = descriptor.span(name)
        assert span.offset_bytes == index * strides["2"]
        assert span.layer_stride_bytes == strides["L"]
        assert span.block_stride_bytes == strides["B"]


def test_planes_of_one_layer_count_interleave_and_groups_follow_one_another() -> None:
    """A hybrid model's sliding-window layers lie behind its full ones."""
    full_k, full_v = (Plane(name, 2, DataType.UINT8, 32, "opaque") for name in ("k", "v"))
    window = Plane("w", 3, DataType.UINT8, 16, "opaque")
    descriptor = Layout("m", 16, (full_k, window, full_v), scratch_blocks=0).descriptor(4)
    assert [(span.plane.name, span.offset_bytes, span.layer_stride_bytes) for span in descriptor.spans] == [
        ("k", 0, 256),
        ("w", 512, 64),
        ("v", 128, 256),
    ]


def test_smollm2_takes_46080_bytes_a_token() -> None:
    """The figure that the model's own dimensions give."""
    assert SMOLLM2.block_bytes == 64 * 46_080


def test_scaled_attention_adds_one_float_a_token_and_head() -> None:
    """fp8 values and their scales are planes of one block."""
    layout = Layout.scaled_attention("m", 4, 2, 64, DataType.FLOAT8_E4M3, 32)
    assert [(p.name, p.data_type, p.page_bytes, p.head_dim) for p in layout.planes] == [
        ("k", DataType.FLOAT8_E4M3, 4096, 64),
        ("v", DataType.FLOAT8_E4M3, 4096, 64),
        ("k_scale", DataType.FLOAT32, 256, 1),
        ("v_scale", DataType.FLOAT32, 256, 1),
    ]


def test_latent_attention_has_one_plane() -> None:
    """MLA keeps one vector a token, without heads."""
    layout = Layout.latent("m", 27, 576, DataType.BFLOAT16)
    assert layout.planes == (Plane("latent", 27, DataType.BFLOAT16, 64 * 576 * 2, TOKEN_HEAD_DIM, 1, 576),)


@pytest.mark.parametrize(
    ("make", "field", "value"),
    [
        (lambda: Layout.attention("m", 1, 1, 8, DataType.FLOAT16, 0), "block_tokens", "0"),
        (lambda: Layout.attention("m", 1, 1, 8, DataType.FLOAT16, -16), "block_tokens", "-16"),
        (lambda: Layout.attention("m", 1, 1, 8, DataType.FLOAT16, 24), "block_tokens", "24"),
        (lambda: Layout.attention("m", 1, 1, 8, DataType.FLOAT16, 528), "block_tokens", "528"),
        (lambda: Layout.attention("", 1, 1, 8, DataType.FLOAT16), "model", "''"),
        (lambda: Layout.attention("a\nb", 1, 1, 8, DataType.FLOAT16), "model", r"'a\nb'"),
        (lambda: Layout.attention("m", 0, 1, 8, DataType.FLOAT16), "planes.k.layer_count", "0"),
        (lambda: Layout.attention("m", 1, 2**16 + 1, 8, DataType.FLOAT16), "planes.k.head_count", "65537"),
        (lambda: Layout.attention("m", 1, 1, 2**64, DataType.FLOAT16), "planes.k.head_dim", f"{2**64}"),
        (lambda: Layout.attention("m", 1, 1, 8.0, DataType.FLOAT16), "planes.k.head_dim", "8.0"),  # type: ignore[arg-type]
        (lambda: Layout.attention("m", True, 1, 8, DataType.FLOAT16), "planes.k.layer_count", "True"),
        (lambda: Layout.attention("m", 1, 1, 8, "float16"), "planes.k.data_type", "'float16'"),  # type: ignore[arg-type]
        (lambda: dataclasses.replace(SMOLLM2, tp_size=0), "tp_size", "0"),
        (lambda: dataclasses.replace(SMOLLM2, scratch_blocks=65), "scratch_blocks", "65"),
        (lambda: dataclasses.replace(SMOLLM2, planes=()), "planes", "0"),
        (lambda: dataclasses.replace(SMOLLM2, planes=SMOLLM2.planes[:1] * 2), "planes", "['k', 'k']"),
        (lambda: Plane("k", 1, DataType.UINT8, 1000, "opaque"), "planes.k.page_bytes", "1000"),
        (lambda: Plane("k", 1, DataType.UINT8, 2**31, "opaque"), "planes.k.page_bytes", f"{2**31}"),
        (lambda: Plane("k", 1, DataType.UINT8, 32, "opaque", head_count=2), "planes.k.head_count", "2"),
        (lambda: dataclasses.replace(SMOLLM2, block_tokens=32), "planes.k.page_bytes", "49152"),
        (lambda: SMOLLM2.descriptor(1), "block_count", "1"),
        (lambda: SMOLLM2.descriptor(2**31), "block_count", f"{2**31}"),
        (lambda: SMOLLM2.descriptor(2**30), "size_bytes", f"{2**30 * SMOLLM2.block_bytes}"),
    ],
)  # fmt: skip
def test_a_field_out_of_range_is_named_with_its_value_limit_and_remedy(make: Any, field: str, value: str) -> None:
    """Numbers from the wire are bounded before anything is computed from them."""
    with pytest.raises(LayoutInvalid, match="must be") as raised:
        make()
    assert (raised.value.field, raised.value.value) == (field, value)
    assert raised.value.limit in str(raised.value)
    assert raised.value.remedy in str(raised.value)


def test_a_long_value_is_cut_in_the_error() -> None:
    """An error carries no megabyte of somebody's field."""
    with pytest.raises(LayoutInvalid) as raised:
        dataclasses.replace(SMOLLM2, model="x" * 2**20)
    assert len(str(raised.value)) < 300


def test_every_differing_field_is_named_with_both_values() -> None:
    """Opening a pool with another layout says what to change, all of it at once."""
    other = Layout.attention(
        "other", 30, 3, 64, DataType.BFLOAT16, 32, order=BlockOrder.BLOCK_MAJOR, tp_size=2, scratch_blocks=2
    )
    expected = {
        "model": ("smollm2", "other"),
        "block_tokens": ("64", "32"),
        "order": ("layer_major", "block_major"),
        "tp_size": ("1", "2"),
        "scratch_blocks": ("1", "2"),
        "planes.k.data_type": ("float32", "bfloat16"),
        "planes.k.page_bytes": ("49152", "12288"),
        "planes.v.data_type": ("float32", "bfloat16"),
        "planes.v.page_bytes": ("49152", "12288"),
    }
    assert SMOLLM2.differences(other) == expected
    with pytest.raises(LayoutMismatch) as raised:
        SMOLLM2.require_equal(other)
    for field, (own, others) in expected.items():
        assert f"{field} is {others}, the pool has {own}" in str(raised.value)
    assert str(raised.value).endswith("; open another, or drop this one first")


def test_planes_that_only_one_layout_has_are_named() -> None:
    """A missing plane is a difference, and so is another order of the same ones."""
    latent = Layout.latent("smollm2", 30, 64, DataType.FLOAT32)
    assert SMOLLM2.differences(latent) == {"planes": ("k,v", "latent")}
    swapped = dataclasses.replace(SMOLLM2, planes=SMOLLM2.planes[::-1])
    assert SMOLLM2.differences(swapped) == {"planes": ("k,v", "v,k")}


def test_equal_layouts_do_not_differ() -> None:
    """Equality is by value, however a layout was made."""
    twin = dataclasses.replace(SMOLLM2, planes=list(SMOLLM2.planes))  # type: ignore[arg-type]
    assert twin == SMOLLM2
    assert SMOLLM2.differences(twin) == {}
    SMOLLM2.require_equal(twin)


@given(layouts(), layouts())
def test_layouts_differ_exactly_when_they_are_not_equal(one: Layout, other: Layout) -> None:
    """`differences` looks at every field, in either direction."""
    assert bool(one.differences(other)) == (one != other)
    assert set(one.differences(other)) == set(other.differences(one))


@pytest.mark.parametrize(
    ("layer", "block", "told"),
    [
        (-1, 0, "layer -1 is outside [0, 30): count the plane's layers from 0"),
        (30, 0, "layer 30 is outside [0, 30): count the plane's layers from 0"),
        (0, -1, "block -1 is outside [0, 4): take blocks from a table of this pool"),
        (0, 4, "block 4 is outside [0, 4): take blocks from a table of this pool"),
    ],
)
def test_a_page_outside_the_descriptor_has_no_address(layer: int, block: int, told: str) -> None:
    """Negative numbers do not count from the end."""
    with pytest.raises(OutOfBounds, match=f"^{re.escape(told)}$"):
        SMOLLM2.descriptor(4).page_offset_bytes("k", layer, block)


def test_an_unknown_plane_is_named_with_the_known_ones() -> None:
    """A misspelt plane is the caller's mistake, not a KeyError."""
    with pytest.raises(PlaneUnknown, match="no plane 'key' in this layout: it has k, v, name one of these"):
        SMOLLM2.descriptor(4).span("key")
