"""The processes of the peers, ended with the block that began them; their messages lie beside their environments."""

import os
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench import drivers

HERE = Path(__file__).parent
ENVIRONMENTS = Path("build/peers")
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 20.0
# Nothing is reported to anybody.
SWITCHES = {
    "OMP_NUM_THREADS": "1",
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_DISABLE_BANNER": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


SCHEMES = {"zmq": "tcp", "grpc": "grpc"}


class PeerFailed(Exception):
    """A server of a peer ended or did not start."""


@contextmanager
def driver(peer: str, name: str = "driver") -> Iterator[drivers.Driver]:
    """Runs a peer's driver in the peer's environment."""
    name = f"{peer}_{name}"
    command = [ENVIRONMENTS / peer / "bin/python", HERE / f"{peer}_driver.py"]
    with log(name).open("w") as messages, drivers.driver(name, command, messages=messages, **SWITCHES) as started:
        yield started


def log(name: str) -> Path:
    """Returns where a peer's process leaves its messages."""
    return ENVIRONMENTS / f"{name}.log"


@dataclass(frozen=True, slots=True)
class Server:
    """Where LMCache's server listens."""

    url: str
    http_url: str


@contextmanager
def lmcache_server(transport: str, size_gib: int) -> Iterator[Server]:
    """Runs LMCache's server with its defaults over "zmq", its default, or "grpc"; where it listens, once it does."""
    port, http_port, metrics_port = (_free_port() for _ in range(3))
    options = {
        "--transport": transport,
        "--host": "127.0.0.1",
        "--port": port,
        "--http-host": "127.0.0.1",
        "--http-port": http_port,
        "--prometheus-port": metrics_port,
        "--l1-size-gb": size_gib,
        "--eviction-policy": "LRU",
    }
    arguments = [str(part) for option in options.items() for part in option]
    with log(f"lmcache_server_{transport}").open("w") as messages:
        process = subprocess.Popen(
            [ENVIRONMENTS / "lmcache/bin/lmcache", "server", *arguments],
            stdout=messages,
            stderr=messages,
            env={**os.environ, **SWITCHES},
        )
        try:
            http_url = f"http://127.0.0.1:{http_port}"
            _wait_until_serving(http_url, process)
            yield Server(f"{SCHEMES[transport]}://127.0.0.1:{port}", http_url)
        finally:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_serving(http_url: str, process: "subprocess.Popen[bytes]") -> None:
    # Its HTTP side opens when the rest does; its exit ends waiting early.
    for _ in range(int(START_TIMEOUT_S / 0.1)):
        try:
            code = process.wait(timeout=0.1)
        except subprocess.TimeoutExpired:
            try:
                urllib.request.urlopen(http_url, timeout=5.0).close()
            except urllib.error.HTTPError:
                return
            except OSError:
                continue
            return
        raise PeerFailed(f"LMCache's server ended with exit code {code}; its messages are in {ENVIRONMENTS}")
    raise PeerFailed(f"LMCache's server did not serve within {START_TIMEOUT_S:.0f} s")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])
