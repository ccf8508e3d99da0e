"""`make bench-peers`: measures beside other projects, prints a table, adds it to build/bench.json."""

import tempfile
from pathlib import Path

from bench.figures import load, show, write
from bench.peers import beside_lmcache, beside_vllm
from kvharbor.demo.processes import service

MEMORY = "1GiB"


def main() -> None:
    """Measures everything, in one run on one machine."""
    with tempfile.TemporaryDirectory(prefix="kvharbor-bench-") as folder:
        socket_path = Path(folder) / "kvharbor.sock"
        with service(socket_path, MEMORY):
            figures = [load("load_average_before_peers")]
            figures += beside_vllm.measure(socket_path, rounds=100)
            figures += beside_lmcache.measure(socket_path, rounds=25)
    show(figures, "kvharbor bench-peers")
    write(figures, Path("build/bench.json"), "bench-peers")


if __name__ == "__main__":
    main()
