"""The table [pools.NAME.layout]: a layout as an operator writes it."""

from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

if TYPE_CHECKING:
    from kvharbor.gpumem import Layout, Plane


class PlaneSettings(BaseModel):
    """One plane. Without `interior` its pages are `[token, head, dim]`, and their size follows from the shape."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(description='E.g. "k" and "v".')
    layer_count: int = Field(description="Layers that have such a page.")
    data_type: Literal["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "uint8"] = Field(
        description="Of the elements; names are torch's."
    )
    head_count: int = Field(default=0, description="KV heads of a page of tokens.")
    head_dim: int = Field(default=0, description="Elements of a head.")
    interior: str = Field(default="token_head_dim", description="Tag of an inside that only engines understand.")
    page_bytes: int | None = Field(default=None, description="Needed with a tag of an engine's own.")


class LayoutSettings(BaseModel):
    """What the engines of a pool will put there, field by field as they name it in OpenPool."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(description="Name of the model.")
    block_tokens: int = Field(default=64, description="Tokens of a block.")
    tp_size: int = Field(default=1, description="Ranks that share the model's heads.")
    scratch_blocks: int = Field(default=1, description="Blocks for padding writes.")
    order: Literal["layer_major", "block_major"] = Field(default="layer_major", description="The outer axis.")
    planes: list[PlaneSettings] = Field(description="The planes, in the engines' order.")

    def layout(self) -> "Layout":
        """Returns the layout; raises LayoutInvalid with field, value, limit and remedy."""
        # Here, not above: it brings numpy, and most settings have no layout.
        from kvharbor.gpumem import BlockOrder, Layout

        return Layout(
            model=self.model,
            block_tokens=self.block_tokens,
            planes=tuple(self._plane(plane) for plane in self.planes),
            order=BlockOrder(self.order),
            tp_size=self.tp_size,
            scratch_blocks=self.scratch_blocks,
        )

    def _plane(self, plane: PlaneSettings) -> "Plane":
        from kvharbor.gpumem import DataType, Plane

        kind = DataType(plane.data_type)
        if plane.page_bytes is None:
            shape: tuple[Any, ...] = (plane.layer_count, plane.head_count, plane.head_dim, kind, self.block_tokens)
            return Plane.of_tokens(plane.name, *shape)
        return Plane(
            plane.name,
            plane.layer_count,
            kind,
            plane.page_bytes,
            plane.interior,
            plane.head_count,
            plane.head_dim,
        )
