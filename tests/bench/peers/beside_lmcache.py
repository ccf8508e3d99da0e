"""Our service beside LMCache's server: what of a prompt is there, and how soon a worker can attend over it."""

import time
from array import array
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import torch

from bench.calls import acquire_s
from bench.drivers import Driver
from bench.figures import Figure, interleaved
from bench.peers.processes import driver, lmcache_server
from kvharbor.client import Pool, connect
from kvharbor.engines.transformers.pieces import PoolWindow
from kvharbor.gpumem import DataType, Layout

# 64 MiB, in whole blocks and chunks of both; one token more is asked for, as a model has to compute one.
TOKENS = 2_048
LAYERS, KV_HEADS, HEAD_DIM = 8, 8, 128
LMCACHE_SHAPE = f"(2,1024,16,{KV_HEADS},{HEAD_DIM}):float16:{LAYERS}"
LMCACHE_GIB = 1
OUR_BYTES = 256 * 2**20
LOOKUPS = 16
RETRIEVES = 4
PROMPT = array("I", range(TOKENS + 1)).tobytes()


class Ours:
    """A worker of ours with the prompt in its pool."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self._window = PoolWindow(pool.views)
        with pool.allocate(PROMPT) as sequence:
            for piece in self._window.pieces(sequence.table, TOKENS):
                for layer, (keys, values) in enumerate(zip(piece.keys, piece.values, strict=True), start=1):
                    keys.fill_(layer)
                    values.fill_(-layer)
            sequence.commit(TOKENS)

    def allocate_s(self) -> float:
        """Allocates the prompt; returns the seconds, without those of its release."""
        start = time.perf_counter()
        sequence = self.pool.allocate(PROMPT)
        taken = time.perf_counter() - start
        sequence.release()
        return taken

    def attend_s(self) -> float:
        """Allocates the prompt and cuts the views that a worker attends over; returns the seconds."""
        start = time.perf_counter()
        sequence = self.pool.allocate(PROMPT)
        pieces = self._window.pieces(sequence.table, sequence.cached_tokens)
        taken = time.perf_counter() - start
        _require_all(pieces[0].keys, sequence.cached_tokens)
        sequence.release()
        return taken


def _require_all(keys: tuple[torch.Tensor, ...], cached_tokens: int) -> None:
    if cached_tokens != TOKENS or any(key[0, 0, 0, 0] != layer for layer, key in enumerate(keys, start=1)):
        raise RuntimeError("what is there is not what was committed")


def measure(socket_path: Path, rounds: int) -> list[Figure]:
    """Measures `lmcache_lookup_over_ours` and `lmcache_retrieve_over_ours`."""
    shape = Layout.attention(
        "beside-lmcache", layers=LAYERS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, data_type=DataType.FLOAT16
    )
    with ExitStack() as stack:
        harbor = stack.enter_context(connect(str(socket_path)))
        ours = Ours(harbor.open_pool("beside-lmcache", shape, size=OUR_BYTES))
        zmq, grpc = (_lmcache(stack, transport) for transport in ("zmq", "grpc"))
        # Some in a row, for all: the first call after another's turn finds the processor's caches cold.
        samples: dict[str, Callable[[], float]] = {
            "lookup": lambda: zmq.ask(do="lookup", times=LOOKUPS)["taken_s"],
            "lookup_grpc": lambda: grpc.ask(do="lookup", times=LOOKUPS)["taken_s"],
            "allocate": lambda: median(ours.allocate_s() for _ in range(LOOKUPS)),
            "acquire": lambda: median(acquire_s(ours.pool, PROMPT) for _ in range(LOOKUPS)),
            "retrieve": lambda: zmq.ask(do="retrieve", times=RETRIEVES)["taken_s"],
            "attend": lambda: median(ours.attend_s() for _ in range(RETRIEVES)),
        }
        interleaved(samples, 2)
        taken = interleaved(samples, rounds)
    return [
        Figure("lmcache_lookup_us_2048", taken["lookup"] * 1e6, "us", None),
        Figure("allocate_us_2048", taken["allocate"] * 1e6, "us", None),
        Figure("lmcache_lookup_over_ours", taken["lookup"] / taken["allocate"], "ratio", 4.0, "higher"),
        Figure("acquire_us_2048", taken["acquire"] * 1e6, "us", None),
        Figure("lmcache_lookup_over_acquire", taken["lookup"] / taken["acquire"], "ratio", None, "higher"),
        Figure("lmcache_grpc_lookup_us_2048", taken["lookup_grpc"] * 1e6, "us", None),
        Figure("lmcache_grpc_lookup_over_ours", taken["lookup_grpc"] / taken["allocate"], "ratio", None, "higher"),
        Figure("lmcache_retrieve_us_64mib", taken["retrieve"] * 1e6, "us", None),
        Figure("attend_us_64mib", taken["attend"] * 1e6, "us", None),
        Figure("lmcache_retrieve_over_ours", taken["retrieve"] / taken["attend"], "ratio", None, "higher"),
    ]


def _lmcache(stack: ExitStack, transport: str) -> Driver:
    """Starts a server and a client with the prompt in it."""
    server = stack.enter_context(lmcache_server(transport, LMCACHE_GIB))
    client = stack.enter_context(driver("lmcache", transport))
    client.ask(url=server.url, http_url=server.http_url, token_count=TOKENS, shape=LMCACHE_SHAPE)
    return client
