"""What block calls are told: contents of consecutive blocks, with the room or the blocks for them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvharbor.client.calls import NO_NAMESPACE, key_messages, namespace_message, request
from kvharbor.client.errors import InvalidField
from kvharbor.client.hints import NO_HINTS, Hints, hints_message
from kvharbor.client.results import ExtraKey, Namespace
from kvharbor.client.runs import NO_BLOCKS, BlockRun, table_of
from kvharbor.client.tokens import Tokens, token_bytes
from kvharbor.v1 import blocks_pb2

KEY_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """The contents of a prompt's leading whole blocks, and the room that it needs.

    `keys` (32 bytes a block) where the namespace has a scheme, else `tokens` (whole blocks) with their extra keys, of
    offsets from the start of the prompt. `table_block_count`: blocks that the prompt needs in all; what is not there of
    them is leased, 0: nothing. `computes`: the caller computes and commits what is missing, so that others are told.
    One that does neither only asks, and is no request in stats unless it `uses` what it gets. `unless_pending`: while
    another session computes what comes next it is given nothing, and only told of that; ask again a little later.
    """

    keys: bytes = b""
    tokens: Tokens = ()
    extra_keys: Sequence[ExtraKey] = ()
    namespace: Namespace = NO_NAMESPACE
    table_block_count: int = 0
    computes: bool = False
    uses: bool = False
    unless_pending: bool = False

    def message(self, version: str) -> blocks_pb2.BlockChain:
        """Returns it as it is sent by a session of this version of its weights."""
        return request(
            blocks_pb2.BlockChain,
            table_block_count=self.table_block_count,
            computes=self.computes,
            uses=self.uses,
            unless_pending=self.unless_pending,
            **_content(self, version),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitChain:
    """Consecutive leased `blocks` whose KV is written and visible, and what they hold, as in Chain.

    `parent` is the block before the first, which the session holds: one entry, or none for the first of a prompt. Extra
    keys have offsets from the start of `tokens`.
    """

    blocks: BlockRun
    parent: BlockRun = NO_BLOCKS
    keys: bytes = b""
    tokens: Tokens = ()
    extra_keys: Sequence[ExtraKey] = ()
    namespace: Namespace = NO_NAMESPACE
    hints: Hints = NO_HINTS

    def message(self, version: str) -> blocks_pb2.CommitChain:
        """Returns it as it is sent by a session of this version of its weights."""
        return request(
            blocks_pb2.CommitChain,
            parent=table_of(self.parent),
            blocks=table_of(self.blocks),
            hints=hints_message(self.hints),
            **_content(self, version),
        )


def _content(chain: Chain | CommitChain, version: str) -> dict[str, Any]:
    if len(chain.keys) % KEY_BYTES:
        raise InvalidField.of("keys", len(chain.keys), limit=f"{KEY_BYTES} bytes a block", remedy="join whole keys")
    content: dict[str, Any] = {"keys": chain.keys, "token_ids": token_bytes(chain.tokens, "tokens")}
    if chain.extra_keys:
        content["extra_keys"] = key_messages(chain.extra_keys)
    namespace = namespace_message(chain.namespace, version)
    if namespace is not None:
        content["namespace"] = namespace
    return content
