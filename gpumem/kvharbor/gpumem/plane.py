"""One kind of page in a block: its element type, its size, and what is inside."""

import enum
from dataclasses import dataclass
from typing import Self

from kvharbor.gpumem.bounds import check_int, check_member, check_text

TOKEN_HEAD_DIM = "token_head_dim"
"""The interior that views understand: `[token, head, dim]`, contiguous. Other tags are an engine's own."""

PAGE_ALIGNMENT_BYTES = 16


class DataType(enum.Enum):
    """The element types of a plane. Values are torch's names."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT8_E4M3 = "float8_e4m3fn"
    FLOAT8_E5M2 = "float8_e5m2"
    UINT8 = "uint8"

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _ITEM_BYTES[self]


_ITEM_BYTES = {
    DataType.FLOAT32: 4,
    DataType.FLOAT16: 2,
    DataType.BFLOAT16: 2,
    DataType.FLOAT8_E4M3: 1,
    DataType.FLOAT8_E5M2: 1,
    DataType.UINT8: 1,
}


@dataclass(frozen=True, slots=True)
class Plane:
    """One kind of page in every block: K, V, their scales, or an MLA latent.

    `page_bytes` is one block of one layer. With an interior other than TOKEN_HEAD_DIM only the page's bytes
    matter to kvharbor, and `head_count` and `head_dim` are 0.
    """

    name: str
    layer_count: int
    data_type: DataType
    page_bytes: int
    interior: str = TOKEN_HEAD_DIM
    head_count: int = 0
    head_dim: int = 0

    def __post_init__(self) -> None:
        check_text("planes.name", self.name, most=32)
        prefix = f"planes.{self.name}"
        check_text(f"{prefix}.interior", self.interior, most=64)
        check_member(f"{prefix}.data_type", self.data_type, DataType)
        check_int(f"{prefix}.layer_count", self.layer_count, 1, 2**12)
        check_int(f"{prefix}.page_bytes", self.page_bytes, PAGE_ALIGNMENT_BYTES, 2**30, PAGE_ALIGNMENT_BYTES)
        least, most = (1, 2**16) if self.interior == TOKEN_HEAD_DIM else (0, 0)
        check_int(f"{prefix}.head_count", self.head_count, least, most)
        check_int(f"{prefix}.head_dim", self.head_dim, least, most)

    @classmethod
    def of_tokens(
        cls,
        name: str,
        layer_count: int,
        head_count: int,
        head_dim: int,
        data_type: DataType,
        block_tokens: int,
    ) -> Self:
        """Builds a TOKEN_HEAD_DIM plane, whose page follows from its shape."""
        # Checked before they are multiplied, so that an error names the caller's own argument.
        check_block_tokens(block_tokens)
        check_int(f"planes.{name}.head_count", head_count, 1, 2**16)
        check_int(f"planes.{name}.head_dim", head_dim, 1, 2**16)
        check_member(f"planes.{name}.data_type", data_type, DataType)
        page_bytes = token_page_bytes(block_tokens, head_count, head_dim, data_type)
        return cls(name, layer_count, data_type, page_bytes, TOKEN_HEAD_DIM, head_count, head_dim)


def check_block_tokens(block_tokens: int) -> None:
    """Raises LayoutInvalid unless a block of that many tokens can be laid out."""
    check_int("block_tokens", block_tokens, 16, 512, 16)


def token_page_bytes(block_tokens: int, head_count: int, head_dim: int, data_type: DataType) -> int:
    """Returns the bytes of a page `[token, head, dim]`."""
    return block_tokens * head_count * head_dim * data_type.itemsize
