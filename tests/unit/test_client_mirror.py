"""The parts of the client that must stay alike: sync and asyncio, results and messages, README and code."""

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message

from kvharbor import client
from kvharbor.client import aio, calls, channel, descriptors, results
from kvharbor.gpumem import BlockOrder, DataType, Layout
from kvharbor.v1 import cache_service_pb2, pool_service_pb2, types_pb2

CLIENT = Path(client.__file__).parent


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
    made = set(re.findall(r'Call\(\s*"(\w+)"', inspect.getsource(calls)))
    assert {"DescribePool"} == methods - made


@pytest.mark.parametrize("method", ["Commit", "Extend", "Handoff", "Adopt", "Warmup", "Unwarm", "Evict"])
def test_a_call_that_is_not_idempotent_is_never_repeated(method: str) -> None:
    """C8: the channel's retry policy names none of these."""
    config = dict(channel.OPTIONS)["grpc.service_config"]
    assert f'"{method}"' not in config
    assert '"Allocate"' in config


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
