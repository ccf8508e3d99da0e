"""Engines to test with. What is here needs an environment with vLLM: `make test-engines` has two.

The model is SmolLM2 in float32, the pool has 20 blocks: one that is never given out, and 19.
"""

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from service_process import ServiceProcess

HAS_VLLM = importlib.util.find_spec("vllm") is not None
# Not collected elsewhere: they import vLLM, and there are environments for it.
collect_ignore_glob = [] if HAS_VLLM else ["test_vllm_*.py", "test_scheduler_*.py", "test_connector_*.py"]

BLOCK_BYTES = 64 * 46_080
BLOCK_COUNT = 20
COMMON = {"dtype": "float32", "max_model_len": 1024, "enforce_eager": True, "max_num_seqs": 8}


def model_folder() -> str:
    """Returns the folder of the model, converted if it was not before; skips the test where there is none."""
    from kvharbor.engines.transformers import ModelMissing, smollm2_folder

    try:
        return str(smollm2_folder())
    except ModelMissing as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="session")
def engine_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    """A service for engines."""
    folder = tmp_path_factory.mktemp("engines")
    with ServiceProcess(folder / "kv.sock", "--memory=512MiB") as service:
        service.wait_for("ready")
        yield service


StartEngine = Callable[..., Any]


@pytest.fixture(scope="session")
def start_engine(tmp_path_factory: pytest.TempPathFactory, engine_service: ServiceProcess) -> Iterator[StartEngine]:
    """Starts engines, which are not ready yet. `pool` None: plain ones, without a prefix cache."""
    from engines.engine_process import EngineProcess
    from kvharbor.engines.vllm import engine_args

    folder = tmp_path_factory.mktemp("logs")
    started: list[EngineProcess] = []

    def start(
        pool: str | None = "engines", *, multiprocessing: bool = False, settings: Any = None, **more: Any
    ) -> EngineProcess:
        if pool is None:
            own: dict[str, Any] = {"block_size": 64, "enable_prefix_caching": False, "kv_cache_memory_bytes": 2**28}
        else:
            size = BLOCK_COUNT * BLOCK_BYTES
            own = engine_args(str(engine_service.socket), pool, size=size, **(settings or {}))
        arguments = {"model": model_folder(), **COMMON, **own, **more}
        log = folder / f"engine-{len(started)}.log"
        started.append(EngineProcess(log, arguments, multiprocessing=multiprocessing))
        return started[-1]

    yield start
    for engine in started:
        engine.leave()
    for engine in started:
        engine.close()


@pytest.fixture(scope="session")
def engines(start_engine: StartEngine) -> tuple[Any, Any, Any]:
    """Two engines on one pool, of which the second computes prompts in chunks, and a plain one."""
    started = (start_engine(), start_engine(max_num_batched_tokens=128), start_engine(None))
    for engine in started:
        engine.wait_ready()
    return started
