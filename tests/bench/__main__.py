"""`make bench`: measures, prints a table, writes build/bench.json."""

import tempfile
from pathlib import Path

from bench import big_requests, calls, decode_step, first_token, many_clients, owner_memory, pool_alone, recovery
from bench.figures import load, show, write
from kvharbor.demo.processes import service
from ports import free_port

MEMORY = "1GiB"


def main() -> None:
    """Measures everything, in one run on one machine."""
    with tempfile.TemporaryDirectory(prefix="kvharbor-bench-") as folder:
        socket_path = Path(folder) / "kvharbor.sock"
        metrics_address = f"127.0.0.1:{free_port()}"
        with service(socket_path, MEMORY, "--metrics-listen", metrics_address) as process:
            figures = [load("load_average_before")]
            figures += calls.measure(socket_path, rounds=2_000)
            figures += many_clients.measure(socket_path, rounds=8)
            figures += decode_step.measure(socket_path)
            figures += owner_memory.measure(socket_path, process.pid)
            figures += big_requests.measure(socket_path, metrics_address, rounds=5)
            figures += first_token.measure(socket_path, rounds=25)
    figures += pool_alone.measure(rounds=40)
    figures += recovery.measure(rounds=3)
    show(figures, "kvharbor bench")
    write(figures, Path("build/bench.json"), "bench")


if __name__ == "__main__":
    main()
