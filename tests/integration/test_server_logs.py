"""What the log has, and what it never has."""

import json
import subprocess
import sys

import pytest

from conftest import StartService
from kvharbor.v1 import cache_service_pb2 as cache
from kvharbor.v1 import types_pb2
from raw_caller import RawCaller, refused, tokens


def test_prompts_and_secrets_never_reach_the_log(start_fresh: StartService) -> None:
    """S11: through success, refusals, a hand-off and a lost client, at the most talkative level."""
    service = start_fresh(log_level="debug")
    ids = range(31337, 31369)
    namespace = types_pb2.NamespaceKey(salt=b"s3cr3t-salt-01")
    with RawCaller(str(service.socket)) as caller:
        pool_id = caller.open_pool("p", block_count=4)
        request = cache.AllocateRequest(pool_id=pool_id, token_ids=tokens(*ids), namespace=namespace)
        sequence = caller.call(caller.cache.Allocate, request).sequence
        item = cache.CommitItem(sequence_id=sequence.sequence_id, computed_tokens=32)
        handoff = caller.call(caller.cache.Handoff, cache.HandoffRequest(pool_id=pool_id, commit=item))
        for bad in (
            {"reserve_tokens": 16, "token_ids": tokens(*ids, *ids)},
            {"reserve_tokens": 999, "token_ids": tokens(*ids)},
            {"token_ids": tokens(*ids) + b"x"},
        ):
            with refused():
                caller.call(caller.cache.Allocate, cache.AllocateRequest(pool_id=pool_id, namespace=namespace, **bad))
        token = caller.welcome.session_token
    service.wait_for("session ended")
    assert service.stop() == 0
    secrets = ["s3cr3t", token, handoff.handoff_token, "31337, 31338", "31337 31338", "31337,31338"]
    assert [secret for secret in secrets if secret in service.log] == []
    assert tokens(31337, 31338).hex() not in service.log


def test_every_line_is_one_object_with_event_level_and_time(start_fresh: StartService) -> None:
    """For programs; the text form is for people."""
    service, talkative = start_fresh(), start_fresh(log_level="debug")
    for each in (service, talkative):
        assert each.stop() == 0
        entries = [json.loads(line) for line in each.lines]
        assert [entry for entry in entries if not {"event", "level", "timestamp"} <= set(entry)] == []
    assert [entry["event"] for entry in service.entries("ready")] == ["ready"]


@pytest.mark.parametrize(("address", "warned"), [("127.0.0.1:0", 0), ("0.0.0.0:0", 1)])
def test_an_address_beyond_this_host_is_warned_of(start_fresh: StartService, address: str, warned: int) -> None:
    """Clear text on a network is nothing to do unawares."""
    service = start_fresh(listen=address)
    assert len(service.entries("listening in clear text beyond this host")) == warned


UNSENT_ANSWER = """
import logging
from kvharbor.server.configuration.logs import configure
configure("LEVEL", "json")
transport = logging.getLogger("grpc._cython.cygrpc")
transport.error("%s raised in core by servicer method [%s]", "ExecuteBatchError", "Allocate")
transport.error("something else")
"""


@pytest.mark.parametrize(("level", "events"), [("info", 1), ("debug", 2)])
def test_an_answer_whose_caller_has_left_is_no_error(level: str, events: int) -> None:
    """grpc.aio logs each with a traceback: a storm of deadlines would fill the log with what nobody can change."""
    command = [sys.executable, "-c", UNSENT_ANSWER.replace("LEVEL", level)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    assert [json.loads(line)["event"] for line in done.stderr.splitlines()][-1] == "something else"
    assert len(done.stderr.splitlines()) == events
