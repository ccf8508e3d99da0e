"""One engine's sessions with the pool: the scheduler's speaks for all, the worker's maps the memory.

Where both halves are in one process they share one session. Otherwise the worker's process becomes a member of the
scheduler's session as well, by the token in each plan: the blocks that a plan has leased stay out of others' reach
until every process that may write to them is proved gone.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from kvharbor.client import Harbor, Pool, connect
from kvharbor.engines.naming import running_engine
from kvharbor.engines.step_gate import StepGate
from kvharbor.engines.vllm.errors import ContractBroken
from kvharbor.engines.vllm.layout import known_part, require_known_part
from kvharbor.engines.vllm.session import pool_info
from kvharbor.engines.vllm.settings import Settings
from kvharbor.engines.vllm.versions import vllm_version
from kvharbor.engines.vllm_connector.identity import checkpoint_identity
from kvharbor.gpumem import Layout


class Engine:
    """A session with the pool open. Nothing may be copied but within `gate.step()`, after a look at `life`."""

    def __init__(self, settings: Settings, role: str) -> None:
        self.settings = settings
        self.gate = StepGate()
        self.pool: Pool
        self._role = role
        self._over = ""
        self.harbor: Harbor = connect(
            settings.endpoint or None,
            client_name=self.name,
            engine=running_engine("vllm connector", vllm_version(), settings.instance),
            timeout_s=settings.timeout_s,
            on_epoch=self._on_epoch,
        )

    @classmethod
    def opening(cls, settings: Settings, layout: Layout) -> "Engine":
        """Opens the pool, or makes it: for the worker's half."""
        engine = cls(settings, "connector")
        with _closing_on_error(engine):
            engine.pool = engine.harbor.open_pool(settings.pool, layout, settings.pool_bytes or None)
        return engine

    @classmethod
    def finding(cls, settings: Settings, vllm_config: Any, kv_cache_config: Any) -> "Engine":
        """Opens the pool that the worker's half has opened in another process: for the scheduler's half."""
        engine = cls(settings, "connector's scheduler")
        with _closing_on_error(engine):
            info = pool_info(engine.harbor, settings.pool)
            if info is None or info.layout is None:
                raise ContractBroken(f"the pool {settings.pool} that the worker has opened is not there")
            require_known_part(info.layout, known_part(vllm_config, kv_cache_config))
            if (own := checkpoint_identity(vllm_config.model_config, settings.model)) != info.layout.model:
                raise ContractBroken(f"the pool is of model {info.layout.model}, the scheduler's is {own}")
            engine.pool = engine.harbor.open_pool(settings.pool, info.layout)
        return engine

    @property
    def name(self) -> str:
        """How it shows in the service's lists."""
        return f"vllm/{vllm_version()} {self._role}"

    @property
    def life(self) -> str:
        """The life of the pool that its blocks belong to, the same in all processes; empty between two of them."""
        return "" if self.pool.id == self._over else self.pool.id

    def close(self) -> None:
        """Ends the session; repeating it does nothing."""
        self.harbor.close()

    def _on_epoch(self, old_epoch: str, new_epoch: str) -> None:
        del old_epoch, new_epoch
        self._over = self.pool.id
        self.gate.wait_for_end()


@contextlib.contextmanager
def _closing_on_error(engine: Engine) -> Iterator[None]:
    try:
        yield
    except BaseException:
        engine.close()
        raise


_lock = threading.Lock()
_engines: dict[str, Engine] = {}


def offer(vllm_config: Any, engine: Engine) -> None:
    """Leaves the worker's session for the scheduler of the same engine, which vLLM makes after it."""
    with _lock:
        _engines[vllm_config.instance_id] = engine


def take(vllm_config: Any, kv_cache_config: Any, settings: Settings) -> Engine:
    """Returns it, or a session of the scheduler's own where the worker is in another process."""
    with _lock:
        engine = _engines.pop(vllm_config.instance_id, None)
    return engine or Engine.finding(settings, vllm_config, kv_cache_config)
