"""`make bench`: measures, prints a table, writes build/bench.json."""

import tempfile
from pathlib import Path

from bench import calls, first_token, owner_memory, pool_alone, recovery
from bench.figures import show, write
from kvharbor.demo.processes import service

MEMORY = "1GiB"


def main() -> None:
    """Measures everything, in one run on one machine."""
    with tempfile.TemporaryDirectory(prefix="kvharbor-bench-") as folder:
        socket_path = Path(folder) / "kvharbor.sock"
        with service(socket_path, MEMORY) as process:
            figures = calls.measure(socket_path, rounds=2_000)
            figures += owner_memory.measure(socket_path, process.pid)
            figures += first_token.measure(socket_path, rounds=25)
    figures += pool_alone.measure(rounds=40)
    figures += recovery.measure(rounds=3)
    show(figures)
    write(figures, Path("build/bench.json"))


if __name__ == "__main__":
    main()
