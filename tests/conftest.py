"""Services to test against: fresh ones for a test or a module, and one that cheap tests share."""

import contextlib
import gc
import signal
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

import cuda_stub
from contract.leaks import no_leaks as no_leaks
from service_process import ServiceProcess
from turns import arrange, turn

StartService = Callable[..., ServiceProcess]
"""Starts a service and waits until it is ready. Keywords are flags of `kvharbor serve`; `socket` and
`environment` are the place and additional variables."""

SMALL_MEMORY = "64MiB"


NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


def pytest_configure(config: pytest.Config) -> None:
    """Hypothesis, which engines' and GPU environments may lack, times no examples: others' work on the machine decides.

    What a shell starts in the background ignores interrupts, and so would what tests start and then interrupt.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.pluginmanager.hasplugin("hypothesispytest"):
        from hypothesis import HealthCheck, settings

        settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
        settings.load_profile("untimed")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A service takes half a second to start: what starts one of its own is slow. `gpu` is for `make test-gpu`."""
    without_device = _why_no_device(config)
    for item in items:
        if {"start_service", "start_fresh"} & set(getattr(item, "fixturenames", ())):
            item.add_marker("slow")
        if without_device and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=without_device))
    if _is_one_of_several(config):
        arrange(items)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Comes before the timeout, to which waiting for one's turn does not count."""
    if not _is_one_of_several(item.config):
        return (yield)
    with turn(alone=item.get_closest_marker("alone") is not None):
        return (yield)


def _is_one_of_several(config: pytest.Config) -> bool:
    """Whether this process is a worker of pytest-xdist."""
    return hasattr(config, "workerinput")


def _why_no_device(config: pytest.Config) -> str:
    """Why this process cannot use a device; empty if it can."""
    if not NVIDIA_DRIVER.exists():
        return f"needs a CUDA device: there is no {NVIDIA_DRIVER}"
    if config.option.markexpr != "gpu":
        return "needs a process in which CUDA's driver is not the stub: run pytest with -m gpu (make test-gpu)"
    return ""


@pytest.fixture(autouse=True)
def _only_own_garbage() -> Iterator[None]:
    """Keeps what the tests before have left from the collector meanwhile.

    With torch imported one full collection takes a third of a second, in the middle of whatever is being timed.
    """
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def stub_devices() -> tuple[str, str]:
    """UUIDs of the two devices that this process has on the stub of the CUDA driver, as 0 and 1."""
    return cuda_stub.preload()


@pytest.fixture(scope="module")
def start_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartService]:
    """Starts services that live until the end of the module."""
    with starting(tmp_path_factory.mktemp("service")) as start:
        yield start


@pytest.fixture
def start_fresh(tmp_path: Path) -> Iterator[StartService]:
    """Starts services that live until the end of the test."""
    with starting(tmp_path) as start:
        yield start


@pytest.fixture
def service(start_fresh: StartService) -> ServiceProcess:
    """A fresh service."""
    return start_fresh()


@pytest.fixture(scope="session")
def shared_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    """One service for all tests that only need some pool: each opens pools of names of its own."""
    with starting(tmp_path_factory.mktemp("shared")) as start:
        yield start()


@pytest.fixture
def harbor(shared_service: ServiceProcess) -> str:
    """The socket path of the shared service."""
    return str(shared_service.socket)


@contextlib.contextmanager
def starting(folder: Path) -> Iterator[StartService]:
    """Starts services in `folder`, and ends them.

    Each that still runs at the end has to stop on SIGTERM with status 0, and none may leave a file beside its
    socket or a traceback, except those that a test has killed.
    """
    started: list[ServiceProcess] = []

    def start(*, socket: Path | None = None, environment: dict[str, str] | None = None, **flags: str) -> ServiceProcess:
        flags.setdefault("memory", SMALL_MEMORY)
        arguments = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
        place = socket or folder / f"kv{len(started)}.sock"
        started.append(ServiceProcess(place, *arguments, environment=environment))
        started[-1].wait_for("ready")
        return started[-1]

    try:
        yield start
    finally:
        running = [service for service in started if service.process.poll() is None]
        statuses = [service.stop() for service in running]
    assert statuses == [0] * len(running), "\n".join(service.log for service in running)
    orderly = [service for service in started if service.process.returncode == 0]
    assert [path for service in orderly for path in service.files()] == []
    assert [service.log for service in started if "Traceback" in service.log] == []
