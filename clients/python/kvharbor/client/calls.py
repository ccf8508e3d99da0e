"""The calls of the API as values: which method, which request, and what undoes it.

Sync and asyncio clients send the same calls, so that what a call means exists once.
"""

import enum
import functools
import numbers
import operator
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from kvharbor.client.descriptors import layout_message
from kvharbor.client.errors import InvalidField
from kvharbor.client.results import ExtraKey, Namespace
from kvharbor.client.tokens import Tokens, prompt_bytes
from kvharbor.gpumem import Layout
from kvharbor.v1 import cache_service_pb2 as cache
from kvharbor.v1 import pool_service_pb2 as pools
from kvharbor.v1 import types_pb2

Reply = TypeVar("Reply")
_Request = TypeVar("_Request", bound=Message)
NO_NAMESPACE = Namespace()
LIST_PAGE_SIZE = 200
# What a caller's value must be, and how to make it so, by the type of the field that is to carry it.
_HOLDS = {
    FieldDescriptor.TYPE_INT32: ("a whole number from -2**31 to 2**31 - 1", "pass an int"),
    FieldDescriptor.TYPE_UINT32: ("a whole number from 0 to 2**32 - 1", "pass an int"),
    FieldDescriptor.TYPE_INT64: ("a whole number from -2**63 to 2**63 - 1", "pass an int"),
    FieldDescriptor.TYPE_UINT64: ("a whole number from 0 to 2**64 - 1", "pass an int"),
    FieldDescriptor.TYPE_BOOL: ("True or False", "pass a bool"),
    FieldDescriptor.TYPE_STRING: ("text that UTF-8 can hold", "pass a str"),
    FieldDescriptor.TYPE_BYTES: ("bytes", "encode it"),
}


class Repeat(enum.Enum):
    """When a call may be sent again [C8]: TO_ANOTHER process of the service, as its sequences end with a process."""

    ALWAYS = enum.auto()
    TO_ANOTHER = enum.auto()
    NEVER = enum.auto()


@dataclass(frozen=True, slots=True)
class Call(Generic[Reply]):
    """One unary call. `wait_s` is time it may take on purpose, beside the timeout.

    `undo` makes the call that takes its effect back, for a caller that will never see the reply; None where that would
    take too much. `pool` has the present id of the pool that it is for. `repeat`: whether it may be sent again when its
    answer is lost.
    """

    method: str
    request: Message
    wait_s: float = 0.0
    undo: "Callable[[], Call[cache.ReleaseResponse] | None] | None" = None
    pool: "PoolCalls | None" = None
    repeat: Repeat = Repeat.ALWAYS

    def addressed(self) -> Message:
        """Returns the request, for the pool as it is known now: a new epoch gives it a new id."""
        if self.pool is not None:
            self.request.pool_id = self.pool.pool_id  # type: ignore[attr-defined]
        return self.request


def get_server_info() -> Call[pools.GetServerInfoResponse]:
    """Asks for versions and memory."""
    return Call("GetServerInfo", pools.GetServerInfoRequest())


def open_pool(name: str, layout: Layout, size_bytes: int, devices: Sequence[str] = ()) -> Call[pools.OpenPoolResponse]:
    """Finds or makes a pool, its parts on `devices`, by rank; none: where the service likes."""
    if isinstance(devices, str):
        raise InvalidField.of("devices", devices, limit="UUIDs, one a rank", remedy="pass a list or tuple")
    message = request(
        pools.OpenPoolRequest, name=name, layout=layout_message(layout), size_bytes=size_bytes, devices=devices
    )
    return Call("OpenPool", message)


def list_pools(page_token: str) -> Call[pools.ListPoolsResponse]:
    """Asks for a page of pools."""
    return Call("ListPools", pools.ListPoolsRequest(page_size=LIST_PAGE_SIZE, page_token=page_token))


def drop_pool(pool_id: str) -> Call[pools.DropPoolResponse]:
    """Removes a pool."""
    return Call("DropPool", pools.DropPoolRequest(pool_id=pool_id))


def close_session() -> Call[pools.CloseSessionResponse]:
    """Ends the session, with the assertion that nothing of it touches a block any more."""
    return Call("CloseSession", pools.CloseSessionRequest())


def list_sessions(page_token: str) -> Call[pools.ListSessionsResponse]:
    """Asks for a page of sessions."""
    return Call("ListSessions", pools.ListSessionsRequest(page_size=LIST_PAGE_SIZE, page_token=page_token))


def kill_session(session_id: str) -> Call[pools.KillSessionResponse]:
    """Kills the processes of a session."""
    return Call("KillSession", request(pools.KillSessionRequest, session_id=session_id))


def upgrade() -> Call[pools.UpgradeResponse]:
    """Replaces the service's process."""
    return Call("Upgrade", pools.UpgradeRequest())


def stats() -> Call[cache.StatsResponse]:
    """Asks for a snapshot of every pool."""
    return Call("Stats", cache.StatsRequest())


@dataclass(slots=True)
class PoolCalls:
    """The calls on one pool, by its present id. `version` is the session's, which an empty one of a namespace means."""

    pool_id: str
    version: str = ""

    def allocate(
        self,
        tokens: Tokens,
        *,
        namespace: Namespace,
        extra_keys: Sequence[ExtraKey],
        request_id: str | None,
        wait_s: float,
        pending_wait_s: float = 0.0,
        **numbers: Any,
    ) -> Call[cache.AllocateResponse]:
        """Matches, holds and reserves; `numbers` are the request's other fields."""
        request_id = request_id or new_request_id()
        message = request(
            cache.AllocateRequest,
            pool_id=self.pool_id,
            token_ids=prompt_bytes(tokens),
            request_id=request_id,
            **numbers,
        )
        _add_context(message, namespace, extra_keys, self.version)
        if wait_s:
            message.wait.CopyFrom(duration("wait_s", wait_s))
        if pending_wait_s:
            message.pending_wait.CopyFrom(duration("pending_wait_s", pending_wait_s))
        undo = functools.partial(self._release_request, request_id)
        return self._call("Allocate", message, wait_s=wait_s + pending_wait_s, undo=undo)

    def lookup(
        self,
        tokens: Tokens,
        *,
        namespace: Namespace,
        extra_keys: Sequence[ExtraKey],
        max_cached_tokens: int | None,
    ) -> Call[cache.LookupResponse]:
        """Asks what of a prompt is there."""
        message = request(
            cache.LookupRequest,
            pool_id=self.pool_id,
            token_ids=prompt_bytes(tokens),
            max_cached_tokens=max_cached_tokens,
        )
        _add_context(message, namespace, extra_keys, self.version)
        return self._call("Lookup", message)

    def warmup(
        self,
        tokens: Tokens,
        *,
        namespace: Namespace,
        extra_keys: Sequence[ExtraKey],
        ttl_s: float | None,
        wait_s: float = 0.0,
        **fields: Any,
    ) -> Call[cache.WarmupResponse]:
        """Pins a prefix; `fields` are the request's name and fill. Without `fill` it gives a sequence."""
        message = request(cache.WarmupRequest, pool_id=self.pool_id, token_ids=prompt_bytes(tokens), **fields)
        _add_context(message, namespace, extra_keys, self.version)
        if ttl_s is not None:
            message.ttl.CopyFrom(duration("ttl_s", ttl_s))
        if wait_s:
            message.wait.CopyFrom(duration("wait_s", wait_s))
        repeat = Repeat.ALWAYS if "fill" in fields else Repeat.TO_ANOTHER
        return self._call("Warmup", message, wait_s=wait_s, repeat=repeat)

    def claim_warm_task(self) -> Call[cache.ClaimWarmTaskResponse]:
        """Takes a prefix to compute."""
        request_id = new_request_id()
        message = cache.ClaimWarmTaskRequest(pool_id=self.pool_id, request_id=request_id)
        return self._call("ClaimWarmTask", message, undo=functools.partial(self._release_request, request_id))

    def unwarm(self, name: str) -> Call[cache.UnwarmResponse]:
        """Ends a pin."""
        return self._call("Unwarm", request(cache.UnwarmRequest, pool_id=self.pool_id, name=name), repeat=Repeat.NEVER)

    def fork(self, sequence_id: str, child_count: int, *, reserve_tokens: int, group: str) -> Call[cache.ForkResponse]:
        """Makes children."""
        request_id = new_request_id()
        message = request(
            cache.ForkRequest,
            pool_id=self.pool_id,
            sequence_id=sequence_id,
            child_count=child_count,
            reserve_tokens=reserve_tokens,
            request_id=request_id,
            group=group,
        )
        # Not built unless needed: the service is the one to refuse a child_count of a billion.
        undo = functools.partial(self._release_children, request_id, child_count)
        return self._call("Fork", message, undo=undo)

    def adopt(self, handoff_token: str, *, request_id: str | None, group: str) -> Call[cache.AdoptResponse]:
        """Takes a sequence that was handed off."""
        request_id = request_id or new_request_id()
        message = request(
            cache.AdoptRequest,
            pool_id=self.pool_id,
            handoff_token=handoff_token,
            request_id=request_id,
            group=group,
        )
        return self._call("Adopt", message, undo=functools.partial(self._release_request, request_id))

    def extend(self, items: Iterable[cache.ExtendItem]) -> Call[cache.ExtendResponse]:
        """Adds capacity."""
        return self._call("Extend", cache.ExtendRequest(pool_id=self.pool_id, items=items))

    def commit(self, items: Iterable[cache.CommitItem]) -> Call[cache.CommitResponse]:
        """Declares KV written."""
        return self._call("Commit", cache.CommitRequest(pool_id=self.pool_id, items=items))

    def handoff(self, commit: cache.CommitItem) -> Call[cache.HandoffResponse]:
        """Gives a sequence away."""
        return self._call("Handoff", cache.HandoffRequest(pool_id=self.pool_id, commit=commit))

    def release(self, items: Iterable[cache.ReleaseItem]) -> Call[cache.ReleaseResponse]:
        """Ends sequences."""
        return self._call("Release", cache.ReleaseRequest(pool_id=self.pool_id, items=items))

    def evict_block(self, block_id: int, generation: int) -> Call[cache.EvictResponse]:
        """Removes a cached block and its descendants."""
        block = request(cache.EvictBlock, block_id=block_id, generation=generation)
        return self._call("Evict", cache.EvictRequest(pool_id=self.pool_id, block=block), repeat=Repeat.NEVER)

    def evict_unheld(self) -> Call[cache.EvictResponse]:
        """Removes every cached block that nobody holds."""
        return self._call("Evict", cache.EvictRequest(pool_id=self.pool_id, all_unheld=True), repeat=Repeat.NEVER)

    def stats(self) -> Call[cache.StatsResponse]:
        """Asks for a snapshot."""
        return self._call("Stats", cache.StatsRequest(pool_id=self.pool_id))

    def watch(self, start_revision: int) -> cache.WatchRequest:
        """Builds the request of a stream, which is no unary call."""
        return request(cache.WatchRequest, pool_id=self.pool_id, start_revision=start_revision)

    def record(self) -> cache.RecordRequest:
        """Builds the request of a recording, which is no unary call."""
        return cache.RecordRequest(pool_id=self.pool_id)

    def _call(self, method: str, message: Message, **how: Any) -> Call[Any]:
        return Call(method, message, pool=self, **how)

    def _release_request(self, request_id: str) -> Call[cache.ReleaseResponse]:
        return self.release([cache.ReleaseItem(request_id=request_id)])

    def _release_children(self, request_id: str, child_count: int) -> Call[cache.ReleaseResponse]:
        return self.release(cache.ReleaseItem(request_id=f"{request_id}/{child}") for child in range(child_count))


def new_request_id() -> str:
    """Returns an id that makes a call idempotent and undoable [C4]."""
    return secrets.token_hex(8)


def request(kind: Callable[..., _Request], **fields: Any) -> _Request:
    """Builds a message; raises InvalidField, naming it, for a value that its field cannot hold."""
    try:
        return kind(**fields)
    except (TypeError, ValueError):
        raise _first_mistake(kind, fields) from None


def whole(field: str, value: int) -> int:
    """Returns a whole number as Python's own, or raises InvalidField: 20.0 is none."""
    try:
        return operator.index(value)
    except TypeError:
        raise InvalidField.of(field, value, limit="a whole number", remedy="pass an int") from None


def duration(field: str, value_s: float) -> Duration:
    """Returns seconds as a Duration, or raises InvalidField."""
    if not isinstance(value_s, numbers.Real) or not 0 <= value_s < 2**31:
        raise InvalidField.of(field, value_s, limit="seconds from 0 to 2**31", remedy="pass a number of seconds")
    return Duration(seconds=int(value_s), nanos=int(value_s % 1 * 1e9))


def namespace_message(namespace: Namespace, version: str) -> types_pb2.NamespaceKey | None:
    """Returns a namespace as a message, None where all of it is empty.

    The session's `version` is named where the caller names none: what is sent again later still means the same one.
    """
    if namespace == NO_NAMESPACE and not version:
        return None
    return request(
        types_pb2.NamespaceKey,
        version=namespace.version or version,
        adapter=namespace.adapter,
        salt=namespace.salt,
        scheme=namespace.scheme,
    )


def key_messages(extra_keys: Iterable[ExtraKey]) -> list[types_pb2.ExtraKey]:
    """Returns extra keys as messages."""
    return [request(types_pb2.ExtraKey, token_offset=key.token_offset, value=key.value) for key in extra_keys]


def _first_mistake(kind: Callable[..., _Request], fields: dict[str, Any]) -> InvalidField:
    """Returns the error of the first field that alone cannot be built either."""
    for name, value in fields.items():
        try:
            kind(**{name: value})
        except (TypeError, ValueError) as failure:
            field = kind().DESCRIPTOR.fields_by_name[name]
            limit, remedy = _HOLDS.get(field.type, ("a value of its type", str(failure)))
            return InvalidField.of(name, value, limit=limit, remedy=remedy)
    return InvalidField.of("request", fields, limit="values that the API's fields can hold", remedy="correct them")


def _add_context(
    message: cache.AllocateRequest | cache.LookupRequest | cache.WarmupRequest,
    namespace: Namespace,
    extra_keys: Sequence[ExtraKey],
    version: str,
) -> None:
    if (key := namespace_message(namespace, version)) is not None:
        message.namespace.CopyFrom(key)
    if extra_keys:
        message.extra_keys.extend(key_messages(extra_keys))
