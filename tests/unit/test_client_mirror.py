"""The parts of the client that must stay alike: sync and asyncio, results and messages, README and code."""

import dataclasses
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message

from kvharbor import client
from kvharbor.client import (
    Draining,
    PoolNotFound,
    ResumeRequired,
    ServiceUnreachable,
    Starting,
    aio,
    calls,
    channel,
    descriptors,
    results,
    returning,
)
from kvharbor.client.calls import NO_NAMESPACE, PoolCalls
from kvharbor.gpumem import BlockOrder, DataType, Layout
from kvharbor.v1 import cache_service_pb2, pool_service_pb2, types_pb2

CLIENT = Path(client.__file__).parent
POOL_CALLS = PoolCalls("e.1")


def public_methods(kind: type) -> dict[str, Any]:
    wanted = {"__enter__": "enter", "__exit__": "exit", "__aenter__": "enter", "__aexit__": "exit"}
    return {
        wanted.get(name, name): member
        for name, member in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_") or name in wanted
    }


@pytest.mark.parametrize("name", aio.__all__)
def test_the_asyncio_client_has_the_names_and_parameters_of_the_synchronous_one(name: str) -> None:
    """Only what is awaited differs."""
    ours, theirs = getattr(client, name), getattr(aio, name)
    if inspect.isfunction(ours):
        pairs = {name: (ours, theirs)}
    else:
        sync, asynchronous = public_methods(ours), public_methods(theirs)
        assert sync.keys() == asynchronous.keys()
        pairs = {method: (sync[method], asynchronous[method]) for method in sync}
    for method, (left, right) in pairs.items():
        parameters = [
            [(p.name, p.kind, p.default) for p in inspect.signature(f).parameters.values()] for f in (left, right)
        ]
        assert parameters[0] == parameters[1], method


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (results.PoolStats, cache_service_pb2.PoolStats),
        (results.PoolCounters, cache_service_pb2.PoolCounters),
        (results.TenantStats, cache_service_pb2.TenantStats),
    ],
)
def test_statistics_have_the_fields_of_their_messages(result: Any, message: type[Message]) -> None:
    """A field that is added to the API cannot be forgotten here."""
    expected = [field.name for field in message.DESCRIPTOR.fields]
    assert expected == [field.name for field in dataclasses.fields(result)]


def test_every_unary_method_of_the_api_is_called_by_someone() -> None:
    """No call of the API is out of reach of a Python caller, but DescribePool: open and list tell the same."""
    services = (
        cache_service_pb2.DESCRIPTOR.services_by_name["CacheService"],
        pool_service_pb2.DESCRIPTOR.services_by_name["PoolService"],
    )
    methods = {method.name for service in services for method in service.methods if not method.server_streaming}
    source = inspect.getsource(calls) + inspect.getsource(returning)
    made = set(re.findall(r'[Cc]all\(\s*"(\w+)"', source))
    assert {"DescribePool"} == methods - made


def warmup(**fields: Any) -> calls.Call[Any]:
    return POOL_CALLS.warmup([1], namespace=NO_NAMESPACE, extra_keys=(), ttl_s=None, name="w", **fields)


ALL_CALLS: dict[str, Callable[[], calls.Call[Any]]] = {
    "allocate": lambda: POOL_CALLS.allocate([1], namespace=NO_NAMESPACE, extra_keys=(), request_id=None, wait_s=0),
    "adopt": lambda: POOL_CALLS.adopt("t", request_id=None, group=""),
    "fork": lambda: POOL_CALLS.fork("e.1.1.1", 1, reserve_tokens=0, group=""),
    "commit": lambda: POOL_CALLS.commit([]),
    "extend": lambda: POOL_CALLS.extend([]),
    "handoff": lambda: POOL_CALLS.handoff(cache_service_pb2.CommitItem()),
    "release": lambda: POOL_CALLS.release([]),
    "warmup_present": lambda: POOL_CALLS.warmup(
        [1], namespace=NO_NAMESPACE, extra_keys=(), ttl_s=None, name="w", fill=3
    ),
    "warmup": lambda: POOL_CALLS.warmup([1], namespace=NO_NAMESPACE, extra_keys=(), ttl_s=None, name="w"),
    "unwarm": lambda: POOL_CALLS.unwarm("w"),
    "evict_block": lambda: POOL_CALLS.evict_block(1, 1),
    "evict_unheld": POOL_CALLS.evict_unheld,
    "stats": POOL_CALLS.stats,
}


@pytest.mark.parametrize("name", ALL_CALLS)
def test_only_what_may_be_repeated_is(name: str) -> None:
    """C8: an answer may be lost on its way, so a call is sent again only if it does no more than one would."""
    call, lost = ALL_CALLS[name](), ServiceUnreachable("gone")
    to_same, to_next = (channel.Tries(call, has_side=True).again(lost, to_another=other) for other in (False, True))
    assert to_same == (name not in {"warmup", "unwarm", "evict_block", "evict_unheld"})
    assert to_next == (name not in {"unwarm", "evict_block", "evict_unheld"})


@pytest.mark.parametrize("has_side", [True, False])
def test_what_was_refused_at_the_door_is_repeated_where_a_side_socket_tells_of_the_end(has_side: bool) -> None:
    """C8: nothing was done; without a side socket nobody knows whether waiting helps."""
    for refusal in (ResumeRequired("r"), Draining("d"), Starting("s")):
        assert channel.Tries(POOL_CALLS.unwarm("w"), has_side=has_side).again(refusal, to_another=False) is has_side
    tries = channel.Tries(POOL_CALLS.stats(), has_side=has_side)
    tried = [tries.again(ServiceUnreachable("gone"), to_another=False) for _ in range(6)]
    assert tried == [True] * 6 if has_side else [True] * 3 + [False] * 3
    assert not channel.Tries(POOL_CALLS.stats(), has_side=has_side).again(PoolNotFound("p"), to_another=True)


@pytest.mark.parametrize("data_type", DataType)
@pytest.mark.parametrize("order", BlockOrder)
def test_a_layout_survives_the_wire(data_type: DataType, order: BlockOrder) -> None:
    """Every type and order has a message, and a descriptor comes back with the spans that were sent."""
    layout = Layout.attention("m", 2, 3, 16, data_type, 32, order=order, tp_size=2, scratch_blocks=3)
    descriptor = layout.descriptor(10)
    message = types_pb2.PoolDescriptor(
        layout=descriptors.layout_message(layout),
        block_count=descriptor.block_count,
        size_bytes=descriptor.size_bytes,
        spans=[
            types_pb2.PlaneSpan(
                name=span.plane.name,
                offset_bytes=span.offset_bytes,
                layer_stride_bytes=span.layer_stride_bytes,
                block_stride_bytes=span.block_stride_bytes,
            )
            for span in descriptor.spans
        ],
    )
    assert descriptor == descriptors.descriptor_from(message)


def test_every_rule_of_the_readme_is_cited_and_every_citation_exists() -> None:
    """Rules [C1].. live in the README; code that cites a number must find it there."""
    readme = (CLIENT.parents[1] / "README.md").read_text()
    rules = set(re.findall(r"^\| \[(C\d+)\]", readme, re.MULTILINE))
    source = "".join(path.read_text() for path in CLIENT.rglob("*.py"))
    cited = set(re.findall(r"\[(C\d+)\]", source))
    assert cited <= rules
    assert sorted(f"C{number}" for number in range(1, len(rules) + 1)) == sorted(rules)
