"""How much memory there is for KV, and how much a token takes."""

from dataclasses import dataclass

from kvharbor.server.errors import CommandError
from kvharbor.server.sizes import format_size


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What decides how large KV is: a K and a V vector for each layer and KV head."""

    layer_count: int
    kv_head_count: int
    head_dim: int
    element_bits: int = 16

    @property
    def token_bytes(self) -> int:
        """KV bytes of one token, rounded up to a byte."""
        return -(-2 * self.layer_count * self.kv_head_count * self.head_dim * self.element_bits // 8)


@dataclass(frozen=True, slots=True)
class Room:
    """Memory for KV: what the weights leave of a card."""

    memory_bytes: int
    weight_bytes: int
    token_bytes: int

    def __post_init__(self) -> None:
        if self.kv_bytes < self.token_bytes:
            raise CommandError(
                f"weights of {format_size(self.weight_bytes)} leave no room for KV in {format_size(self.memory_bytes)}:"
                " give the size of a quantised model (8 bits: a byte a parameter; 4 bits: half a byte) or more memory"
            )

    @property
    def kv_bytes(self) -> int:
        """What is left for KV."""
        return self.memory_bytes - self.weight_bytes

    def unit_count(self, unit_tokens: int) -> int:
        """Returns how many slots or blocks of so many tokens there is room for."""
        return self.kv_bytes // (unit_tokens * self.token_bytes)
