"""What of a sequence its owner alone knows: the service keeps no tokens that are not in committed blocks."""

from dataclasses import dataclass
from typing import Any, Self

from kvharbor.client.tokens import TOKEN_BYTES
from kvharbor.v1 import cache_service_pb2 as cache
from kvharbor.v1 import types_pb2


@dataclass(slots=True)
class Tail:
    """The tokens of a sequence from `committed_tokens` on, their extra keys, and where the sequence belongs.

    With cursors and table it is all that another process of the service needs to go on with it [C11].
    """

    committed_tokens: int
    token_ids: bytearray
    extra_keys: list[types_pb2.ExtraKey]
    namespace: types_pb2.NamespaceKey
    pin_name: str = ""

    @classmethod
    def of_prompt(cls, asked: Any, sequence: types_pb2.Sequence, pin_name: str = "") -> Self:
        """Returns the tail of the sequence that a prompt was answered with.

        `asked` is the message that has the prompt: AllocateRequest, WarmupRequest or ClaimWarmTaskResponse.
        """
        first, end = sequence.cached_tokens, sequence.token_count
        token_ids = bytearray(memoryview(asked.token_ids)[first * TOKEN_BYTES : end * TOKEN_BYTES])
        keys = [key for key in asked.extra_keys if first <= key.token_offset < end]
        return cls(first, token_ids, keys, asked.namespace, pin_name)

    @classmethod
    def of_adopted(cls, reply: cache.AdoptResponse) -> Self:
        """Returns the tail of an adopted sequence."""
        return cls(reply.committed_tokens, bytearray(reply.tail_token_ids), [*reply.extra_keys], reply.namespace)

    def of_child(self, child: types_pb2.Sequence) -> "Tail":
        """Returns the tail of a child that was forked off: it has the same blocks and perhaps fewer tokens."""
        token_ids = self.token_ids[: (child.token_count - self.committed_tokens) * TOKEN_BYTES]
        keys = [key for key in self.extra_keys if key.token_offset < child.token_count]
        return Tail(self.committed_tokens, token_ids, keys, self.namespace)

    def append(self, item: cache.CommitItem) -> None:
        """Adds the new tokens of a commit."""
        self.token_ids += item.new_token_ids
        self.extra_keys.extend(item.extra_keys)

    def publish(self, committed_tokens: int) -> None:
        """Forgets what is in committed blocks by now."""
        # The front of a bytearray goes without moving the rest.
        del self.token_ids[: (committed_tokens - self.committed_tokens) * TOKEN_BYTES]
        if self.extra_keys:
            self.extra_keys = [key for key in self.extra_keys if key.token_offset >= committed_tokens]
        self.committed_tokens = committed_tokens
