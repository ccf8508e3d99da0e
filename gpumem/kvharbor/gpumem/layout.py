"""What the blocks of a pool look like, and where each page lies in an arena.

A block holds `block_tokens` tokens of every layer. Its memory is a set of *planes* (K, V, scales, a latent),
and the *page* of (plane, layer, block) is the smallest thing that kvharbor addresses. Everything follows
from the layout and the block count [M2].
"""

import dataclasses
import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self, TypedDict, Unpack

from kvharbor.gpumem.bounds import check_block, check_int, check_layer, check_member, check_text
from kvharbor.gpumem.errors import ArenaTooSmall, LayoutInvalid, LayoutMismatch, PlaneUnknown
from kvharbor.gpumem.plane import TOKEN_HEAD_DIM, DataType, Plane, check_block_tokens, token_page_bytes

MAX_PLANES = 32
MAX_BLOCK_COUNT = 2**31 - 1
"""Block tables are int32."""
MAX_ARENA_BYTES = 2**47
"""The user half of a 48-bit address space; every stride and offset fits an int64 with room to spare."""


class BlockOrder(enum.Enum):
    """Which of layer and block is the outer axis of an arena."""

    LAYER_MAJOR = "layer_major"
    """`[layer, plane, block, page]`: neighbouring blocks of one layer are contiguous (long runs)."""
    BLOCK_MAJOR = "block_major"
    """`[block, layer, plane, page]`: a whole block is contiguous (one memcpy)."""


class LayoutOptions(TypedDict, total=False):
    """The fields of a Layout that its constructors pass through."""

    order: BlockOrder
    tp_size: int
    scratch_blocks: int


@dataclass(frozen=True, slots=True)
class Layout:
    """A pool's fingerprint: two pools may share blocks only if their layouts are equal.

    The first `scratch_blocks` block ids are for padding writes and never hold a prefix [P6]. Raises
    LayoutInvalid at construction, naming field, value, limit and remedy.
    """

    model: str
    block_tokens: int
    planes: tuple[Plane, ...]
    order: BlockOrder = BlockOrder.LAYER_MAJOR
    tp_size: int = 1
    scratch_blocks: int = 1

    def __post_init__(self) -> None:
        check_text("model", self.model, most=256)
        check_block_tokens(self.block_tokens)
        check_member("order", self.order, BlockOrder)
        check_int("tp_size", self.tp_size, 1, 2**10)
        check_int("scratch_blocks", self.scratch_blocks, 0, 64)
        object.__setattr__(self, "planes", tuple(self.planes))
        check_plane_count(len(self.planes))
        names = [plane.name for plane in self.planes]
        if len(set(names)) < len(names):
            raise LayoutInvalid("planes", names, "distinct names", "rename the repeated plane")
        for plane in self.planes:
            self._check_page(plane)

    def _check_page(self, plane: Plane) -> None:
        if plane.interior != TOKEN_HEAD_DIM:
            return
        page_bytes = token_page_bytes(self.block_tokens, plane.head_count, plane.head_dim, plane.data_type)
        if plane.page_bytes != page_bytes:
            raise LayoutInvalid(
                f"planes.{plane.name}.page_bytes",
                plane.page_bytes,
                f"{page_bytes} (block_tokens * head_count * head_dim * itemsize)",
                "correct it, or tag an interior of the engine's own",
            )

    @classmethod
    def attention(
        cls,
        model: str,
        layers: int,
        kv_heads: int,
        head_dim: int,
        data_type: DataType,
        block_tokens: int = 64,
        **options: Unpack[LayoutOptions],
    ) -> Self:
        """Builds the usual layout, planes "k" and "v": `[L, 2, B, P, H, D]` or `[B, L, 2, P, H, D]`."""
        planes = [Plane.of_tokens(name, layers, kv_heads, head_dim, data_type, block_tokens) for name in ("k", "v")]
        return cls(model, block_tokens, tuple(planes), **options)

    @classmethod
    def scaled_attention(
        cls,
        model: str,
        layers: int,
        kv_heads: int,
        head_dim: int,
        data_type: DataType,
        block_tokens: int = 64,
        **options: Unpack[LayoutOptions],
    ) -> Self:
        """Builds "k", "v" (fp8) and "k_scale", "v_scale": a float32 a token and head, `[token, head, 1]`."""
        planes = [
            Plane.of_tokens(name, layers, kv_heads, dim, kind, block_tokens)
            for suffix, dim, kind in (("", head_dim, data_type), ("_scale", 1, DataType.FLOAT32))
            for name in ("k" + suffix, "v" + suffix)
        ]
        return cls(model, block_tokens, tuple(planes), **options)

    @classmethod
    def latent(
        cls,
        model: str,
        layers: int,
        latent_dim: int,
        data_type: DataType,
        block_tokens: int = 64,
        **options: Unpack[LayoutOptions],
    ) -> Self:
        """Builds the single plane "latent" of multi-head latent attention (MLA): `[token, 1, latent_dim]`."""
        plane = Plane.of_tokens("latent", layers, 1, latent_dim, data_type, block_tokens)
        return cls(model, block_tokens, (plane,), **options)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: the pages of all planes and layers."""
        return sum(plane.layer_count * plane.page_bytes for plane in self.planes)

    def differences(self, other: "Layout") -> dict[str, tuple[str, str]]:
        """Returns every field that differs, by dotted name ("planes.k.data_type"), as (own, other's) text."""
        found: dict[str, tuple[str, str]] = {}
        for field in dataclasses.fields(self):
            if field.name != "planes":
                _note_difference(found, "", field.name, (self, other))
        own, others = ({plane.name: plane for plane in layout.planes} for layout in (self, other))
        if list(own) != list(others):
            found["planes"] = (",".join(own), ",".join(others))
        for name in own:
            if name in others:
                for field in dataclasses.fields(Plane):
                    _note_difference(found, f"planes.{name}.", field.name, (own[name], others[name]))
        return found

    def require_equal(self, other: "Layout") -> None:
        """Raises LayoutMismatch with every differing field if `other` is not this layout."""
        if differences := self.differences(other):
            raise LayoutMismatch(differences)

    def descriptor(self, block_count: int) -> "Descriptor":
        """Lays out `block_count` blocks, scratch included, from offset 0, without gap or overlap [M1]."""
        check_int("block_count", block_count, self.scratch_blocks + 1, MAX_BLOCK_COUNT)
        # Each stride above the innermost one counts whole runs of blocks in layer-major, single pages in
        # block-major; otherwise the two orders are the same nest of groups, layers and planes.
        layer_major = self.order is BlockOrder.LAYER_MAJOR
        scale = block_count if layer_major else 1
        spans: dict[str, PlaneSpan] = {}
        offset_bytes = 0
        for layer_count, planes in _groups(self.planes).items():
            layer_bytes = sum(plane.page_bytes for plane in planes)
            plane_bytes = 0
            for plane in planes:
                spans[plane.name] = PlaneSpan(
                    plane,
                    offset_bytes=(offset_bytes + plane_bytes) * scale,
                    layer_stride_bytes=layer_bytes * scale,
                    block_stride_bytes=plane.page_bytes if layer_major else self.block_bytes,
                )
                plane_bytes += plane.page_bytes
            offset_bytes += layer_count * layer_bytes
        return Descriptor(
            layout=self,
            block_count=block_count,
            size_bytes=block_count * self.block_bytes,
            spans=tuple(spans[plane.name] for plane in self.planes),
        )


@dataclass(frozen=True, slots=True)
class PlaneSpan:
    """Where a plane lies: page (layer, block) is at offset + layer * layer_stride + block * block_stride."""

    plane: Plane
    offset_bytes: int
    layer_stride_bytes: int
    block_stride_bytes: int


@dataclass(frozen=True, slots=True)
class Descriptor:
    """The place of every page of an arena, from `Layout.descriptor`: the same on both sides of the wire."""

    layout: Layout
    block_count: int
    size_bytes: int
    spans: tuple[PlaneSpan, ...]

    def __post_init__(self) -> None:
        check_int("size_bytes", self.size_bytes, self.layout.block_bytes, MAX_ARENA_BYTES)

    def span(self, name: str) -> PlaneSpan:
        """Returns the span of the plane `name`, or raises PlaneUnknown."""
        for span in self.spans:
            if span.plane.name == name:
                return span
        raise PlaneUnknown(name, known_planes=", ".join(span.plane.name for span in self.spans))

    def page_offset_bytes(self, name: str, layer: int, block: int) -> int:
        """Returns where the page of (plane, layer, block) starts; all three are checked."""
        span = self.span(name)
        check_layer(layer, span.plane.layer_count)
        check_block("block", block, self.block_count)
        return span.offset_bytes + layer * span.layer_stride_bytes + block * span.block_stride_bytes


def check_plane_count(plane_count: int) -> None:
    """Raises LayoutInvalid unless a layout can have so many planes; for those who must know before making them."""
    if not 1 <= plane_count <= MAX_PLANES:
        raise LayoutInvalid("planes", plane_count, f"1 to {MAX_PLANES} planes", "list the planes of one block")


def block_count_for(size_bytes: int, layout: Layout) -> int:
    """Returns how many whole blocks, scratch included, fit in `size_bytes`.

    Raises ArenaTooSmall when no usable block is left beside the scratch blocks.
    """
    block_count = min(size_bytes // layout.block_bytes, MAX_BLOCK_COUNT)
    least = layout.scratch_blocks + 1
    if block_count < least:
        raise ArenaTooSmall(size_bytes, needed_bytes=least * layout.block_bytes, scratch_blocks=layout.scratch_blocks)
    return block_count


def _groups(planes: Iterable[Plane]) -> dict[int, list[Plane]]:
    """Planes by layer count, in order of first appearance: those of one group interleave per layer."""
    groups: dict[int, list[Plane]] = {}
    for plane in planes:
        groups.setdefault(plane.layer_count, []).append(plane)
    return groups


def _note_difference(found: dict[str, tuple[str, str]], prefix: str, field: str, pair: tuple[object, object]) -> None:
    own, others = (getattr(side, field) for side in pair)
    if own != others:
        texts = [side.value if isinstance(side, enum.Enum) else str(side) for side in (own, others)]
        found[prefix + field] = (texts[0], texts[1])
