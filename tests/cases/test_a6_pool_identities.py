"""A6: everything that changes how bytes are read is in the key, and the key comes from one description."""

import subprocess
import sys

from calls import encode, span

from kvharbor.pool import Commit, Pool, PoolConfig, Prompt
from kvharbor.pool.digest import PlaneIdentity, pool_identity
from kvharbor.pool.events import BlocksStored
from kvharbor.pool.steps import finish


def identity(data_type: str = "bfloat16", page_bytes: int = 2048, interior: str = "x", tp_size: int = 1) -> bytes:
    return pool_identity("m", tp_size, 4, [PlaneIdentity("kv", 1, data_type, page_bytes, interior)])


N1 = identity()
OTHERS = [identity("float8_e4m3fn", 1024), identity(interior="y"), identity(tp_size=2)]


def digests(pool_key: bytes) -> tuple[bytes, ...]:
    """What a pool of this identity calls [1..8]."""
    pool = Pool(PoolConfig(8, 4, identity=pool_key))
    pool.open_session(1, "t")
    view = finish(pool.allocate(1, Prompt(encode(span(1, 8)))))
    finish(pool.commit(1, view.number, Commit(8)))
    (stored,) = pool.drain_events()
    assert isinstance(stored, BlocksStored)
    return stored.digests


def test_pools_of_another_layout_share_no_name() -> None:
    """A6: other data type, layout tag or rank count: other digests for the same tokens, at every depth."""
    mine = set(digests(N1))
    assert [mine & set(digests(other)) for other in OTHERS] == [set(), set(), set()]


def test_an_identical_description_gives_identical_names_in_another_process() -> None:
    """A6: nothing is recomputed by role: a second process with the same description finds the same names."""
    program = (
        "from kvharbor.pool.digest import *\n"
        "key = pool_identity('m', 1, 4, [PlaneIdentity('kv', 1, 'bfloat16', 2048, 'x')])\n"
        "first = block_digest(namespace_digest('t', key, '', '', b''), b''.join(i.to_bytes(4, 'little')"
        " for i in range(1, 5)))\n"
        "print(first.hex())"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=30)
    assert told.stdout.strip() == digests(N1)[0].hex()
