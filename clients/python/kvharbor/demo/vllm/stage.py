"""The processes of the run: one service, two engines on its pool, and a plain one; all end with the block."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from kvharbor.client import Harbor, PoolStats, connect
from kvharbor.demo.processes import service
from kvharbor.demo.vllm.engine_process import EngineProcess
from kvharbor.demo.vllm.outcome import PLAIN
from kvharbor.demo.vllm.script import FIRST, SECOND
from kvharbor.engines.transformers import smollm2_folder
from kvharbor.engines.vllm import engine_args

POOL = "demo"
BLOCK_TOKENS = 64
MEMORY = "512MiB"
POOL_BYTES = 256 << 20
COMMON = {"dtype": "float32", "max_model_len": 1024, "max_num_seqs": 4, "enforce_eager": True}


class Stage:
    """What runs. `harbor` is a session of the demonstration's own, which looks at the service's state."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self._socket_path = folder / "kvharbor.sock"
        self._log = folder / "service.log"
        log = stack.enter_context(self._log.open("wb"))
        self._supervisor = stack.enter_context(service(self._socket_path, MEMORY, "--log-level=info", log=log))
        self.harbor: Harbor = stack.enter_context(connect(self._socket_path, client_name="demo"))
        self.engines = {name: self._engine(name) for name in (FIRST, SECOND)}
        self.plain = self._plain()

    @property
    def service_pids(self) -> list[int]:
        """The processes of the service that may have a pool's file open, the supervisor among them."""
        return [self._supervisor.pid, self._serving_pid]

    def pool(self) -> PoolStats:
        """Returns how the pool stands."""
        (pool,) = self.harbor.stats(POOL).pools
        return pool

    def session_ids(self) -> set[str]:
        """Returns the sessions that live, by id."""
        return {session.session_id for session in self.harbor.list_sessions() if session.state == "live"}

    def kill_service(self) -> None:
        """Kills the process that serves. The supervisor has another one take over."""
        os.kill(self._serving_pid, signal.SIGKILL)

    def restart(self, name: str) -> EngineProcess:
        """Starts an engine once more, with the same arguments."""
        self.engines[name] = self._engine(name)
        return self.engines[name]

    @property
    def _serving_pid(self) -> int:
        entries = [json.loads(line) for line in self._log.read_text().splitlines() if line.startswith("{")]
        return int([entry for entry in entries if entry.get("event") == "ready"][-1]["pid"])

    def _engine(self, name: str) -> EngineProcess:
        own = engine_args(str(self._socket_path), POOL, size=POOL_BYTES, block_tokens=BLOCK_TOKENS, instance=name)
        return self._started(name, own)

    def _plain(self) -> EngineProcess:
        own = {"block_size": BLOCK_TOKENS, "enable_prefix_caching": False, "kv_cache_memory_bytes": POOL_BYTES}
        return self._started(PLAIN, own)

    def _started(self, name: str, own: dict[str, Any]) -> EngineProcess:
        engine = EngineProcess(name, self._folder, {"model": str(smollm2_folder()), **COMMON, **own})
        self._stack.callback(engine.stop)
        return engine


@contextmanager
def stage(folder: Path) -> Iterator[Stage]:
    """Starts everything; the engines may still be loading."""
    with ExitStack() as stack:
        yield Stage(folder, stack)
