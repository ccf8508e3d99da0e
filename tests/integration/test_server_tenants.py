"""Who may see what: tenants by the kernel's word, administrators, and callers without a session."""

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from conftest import StartService
from kvharbor.client import connect
from kvharbor.v1 import cache_service_pb2 as cache
from kvharbor.v1 import cache_service_pb2_grpc
from kvharbor.v1 import pool_service_pb2 as pools
from raw_caller import RawCaller, refused, tokens
from service_process import ServiceProcess

OTHER_UID = 54321


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user may enter."""
    with tempfile.TemporaryDirectory(prefix="kv", dir="/tmp") as folder:
        os.chmod(folder, 0o755)  # noqa: PTH101 - a str
        yield Path(folder)


@contextlib.contextmanager
def as_user(uid: int) -> Iterator[None]:
    """Lets this process act as another user meanwhile: the kernel notes it when a socket connects."""
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def both(start_fresh: StartService, open_folder: Path) -> Iterator[tuple[RawCaller, RawCaller]]:
    """A session of the service's own user, and one of a stranger."""
    if os.geteuid():
        pytest.skip("needs root: only root can connect as another user")
    service = start_fresh(socket=open_folder / "a.sock", socket_mode="0666")
    with as_user(OTHER_UID):
        stranger = RawCaller(str(service.socket))
    with stranger, RawCaller(str(service.socket)) as administrator:
        yield administrator, stranger


@pytest.mark.root
@pytest.mark.slow
def test_a_tenant_sees_nothing_of_another(both: tuple[RawCaller, RawCaller]) -> None:
    """G8: not a pool, not a handle, not a count; the same name is another pool."""
    owner, stranger = both
    assert (owner.welcome.tenant, stranger.welcome.tenant) == ("uid-0", f"uid-{OTHER_UID}")
    pool_id = owner.open_pool("p")
    request = cache.AllocateRequest(pool_id=pool_id, token_ids=tokens(*range(32)))
    sequence_id = owner.call(owner.cache.Allocate, request).sequence.sequence_id
    own_id = stranger.open_pool("p")
    assert own_id != pool_id
    forbidden = [
        (stranger.cache.Allocate, request),
        (stranger.cache.Lookup, cache.LookupRequest(pool_id=pool_id, token_ids=tokens(1))),
        (stranger.cache.Stats, cache.StatsRequest(pool_id=pool_id)),
        (stranger.cache.Unwarm, cache.UnwarmRequest(pool_id=pool_id, name="w")),
        (stranger.pools.DescribePool, pools.DescribePoolRequest(pool_id=pool_id)),
    ]
    for method, asked in forbidden:
        with refused() as found:
            stranger.call(method, asked)
        assert (found[0].code, found[0].reason) == (grpc.StatusCode.NOT_FOUND, "POOL_NOT_FOUND")
    item = cache.ReleaseItem(sequence_id=sequence_id)
    release = cache.ReleaseRequest(pool_id=own_id, items=[item])
    assert stranger.call(stranger.cache.Release, release).results[0].status.code == 5
    assert stranger.call(stranger.pools.DropPool, pools.DropPoolRequest(pool_id=pool_id)).already_dropped
    (seen,) = stranger.call(stranger.cache.Stats, cache.StatsRequest()).pools
    assert [(engine.session_count, engine.prompt_token_count) for engine in seen.engines] == [(1, 0)]
    listed = stranger.call(stranger.pools.ListPools, pools.ListPoolsRequest()).pools
    assert [pool.pool_id for pool in listed] == [own_id]
    assert len(stranger.call(stranger.cache.Stats, cache.StatsRequest()).pools) == 1
    assert len(owner.call(owner.cache.Stats, cache.StatsRequest()).pools) == 2


@pytest.mark.root
@pytest.mark.slow
def test_pins_are_named_to_their_tenant_and_to_administrators(both: tuple[RawCaller, RawCaller]) -> None:
    """In Stats, and where they keep a pool from being dropped."""
    administrator, _ = both
    pool_ids = [caller.open_pool("p") for caller in both]
    for caller, pool_id, name in zip(both, pool_ids, ("ours", "theirs"), strict=True):
        asked = cache.WarmupRequest(pool_id=pool_id, token_ids=tokens(*range(16)), name=name)
        sequence = caller.call(caller.cache.Warmup, asked).sequence
        caller.commit(pool_id, sequence.sequence_id, 16)
    seen = [
        [(pin.name, pin.tenant, pin.pinned_tokens) for pool in reply.pools for pin in pool.pins]
        for reply in (caller.call(caller.cache.Stats, cache.StatsRequest()) for caller in both)
    ]
    theirs = ("theirs", f"uid-{OTHER_UID}", 16)
    assert seen == [[("ours", "uid-0", 16), theirs], [theirs]]
    for caller in both:
        with refused() as found:
            caller.call(caller.pools.DropPool, pools.DropPoolRequest(pool_id=pool_ids[1]))
        assert (found[0].reason, found[0].metadata["pinNames"]) == ("POOL_IN_USE", "'theirs'")
    assert administrator.call(administrator.cache.Unwarm, cache.UnwarmRequest(pool_id=pool_ids[1], name="theirs"))


@pytest.mark.root
@pytest.mark.slow
def test_eviction_is_for_administrators(both: tuple[RawCaller, RawCaller]) -> None:
    """PERMISSION_DENIED, with the user and the remedy; not even one's own pool."""
    _, stranger = both
    pool_id = stranger.open_pool("p")
    with refused() as found:
        stranger.call(stranger.cache.Evict, cache.EvictRequest(pool_id=pool_id, all_unheld=True))
    assert (found[0].code, found[0].reason) == (grpc.StatusCode.PERMISSION_DENIED, "ADMIN_REQUIRED")
    assert found[0].metadata["uid"] == str(OTHER_UID)


@pytest.mark.root
@pytest.mark.slow
def test_recording_is_for_administrators(both: tuple[RawCaller, RawCaller]) -> None:
    """[G8] Not even one's own pool; an administrator records any tenant's."""
    administrator, stranger = both
    pool_id = stranger.open_pool("p")
    with refused() as found:
        next(stranger.record(pool_id)[0])
    assert (found[0].code, found[0].reason) == (grpc.StatusCode.PERMISSION_DENIED, "ADMIN_REQUIRED")
    stream = administrator.record(pool_id)[0]
    assert next(stream).block_tokens == 16
    stream.cancel()


@pytest.mark.root
@pytest.mark.slow
def test_sessions_are_listed_and_killed_by_administrators_only(both: tuple[RawCaller, RawCaller]) -> None:
    """Others learn of nobody's, and end nobody's, the service's process included."""
    _, stranger = both
    for method, request in (
        (stranger.pools.ListSessions, pools.ListSessionsRequest()),
        (stranger.pools.KillSession, pools.KillSessionRequest(session_id=stranger.welcome.session_id)),
        (stranger.pools.Upgrade, pools.UpgradeRequest()),
    ):
        with refused() as found:
            stranger.call(method, request)
        assert (found[0].code, found[0].reason) == (grpc.StatusCode.PERMISSION_DENIED, "ADMIN_REQUIRED")


@pytest.mark.root
@pytest.mark.slow
def test_a_socket_without_a_mode_for_others_is_closed_to_them(start_fresh: StartService, open_folder: Path) -> None:
    """0600: file permissions decide who may use the service at all."""
    if os.geteuid():
        pytest.skip("needs root: only root can connect as another user")
    service = start_fresh(socket=open_folder / "a.sock")
    with as_user(OTHER_UID), pytest.raises(PermissionError):
        RawCaller(str(service.socket))


@pytest.mark.slow
def test_callers_without_a_session_are_who_the_settings_say(start_fresh: StartService) -> None:
    """Over TCP: lookup, stats and watch for the named tenant, and no blocks."""
    service: ServiceProcess = start_fresh(listen="127.0.0.1:0", anonymous_tenant=f"uid-{os.getuid()}")
    with RawCaller(str(service.socket)) as caller:
        pool_id = caller.open_pool("p")
        address = service.wait_for("ready")["listen"]
        with grpc.insecure_channel(address) as channel:
            anonymous = cache_service_pb2_grpc.CacheServiceStub(channel)
            assert len(anonymous.Stats(cache.StatsRequest(), timeout=5).pools) == 1
            lookup = cache.LookupRequest(pool_id=pool_id, token_ids=tokens(1))
            assert anonymous.Lookup(lookup, timeout=5).present_tokens == 0
            stream = anonymous.Watch(cache.WatchRequest(pool_id=pool_id), timeout=5)
            assert next(stream).snapshot.complete
            stream.cancel()
            with refused() as found:
                anonymous.Allocate(cache.AllocateRequest(pool_id=pool_id, token_ids=tokens(1)), timeout=5)
            assert found[0].reason == "SESSION_REQUIRED"


@pytest.mark.root
@pytest.mark.slow
def test_an_administrator_acts_on_the_pool_that_it_means(both: tuple[RawCaller, RawCaller], open_folder: Path) -> None:
    """[S7] Its own before a stranger's of the same name, and the stranger's if that is named or the only one."""
    administrator, stranger = both
    strangers_id, own_id = stranger.open_pool("p"), administrator.open_pool("p")
    socket, tenant = str(open_folder / "a.sock"), f"uid-{OTHER_UID}"
    with connect(socket) as harbor:
        assert (harbor.find_pool("p").id, harbor.find_pool("p", tenant).id) == (own_id, strangers_id)
        administrator.call(administrator.pools.CloseSession, pools.CloseSessionRequest())
        assert {pool.tenant for pool in harbor.stats("p").pools} == {"uid-0", tenant}
        assert harbor.drop_pool("p")
        assert not harbor.drop_pool("p")  # a repeated call is not the stranger's loss
        assert [pool.pool_id for pool in harbor.stats("p", tenant).pools] == [strangers_id]
        stranger.call(stranger.pools.CloseSession, pools.CloseSessionRequest())
        command = [sys.executable, "-m", "kvharbor.server.cli"]
        ended = subprocess.run(
            [*command, "exec", "--pool", "p", "--socket", socket, "--", "true"],
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )
        assert (ended.returncode, harbor.list_pools()[0].tenant) == (1, tenant), ended.stderr
    told = subprocess.check_output([*command, "drop", "p", "--socket", socket], text=True, timeout=30)
    assert told == f"pool p of tenant {tenant} dropped\n"
