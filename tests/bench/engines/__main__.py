"""`make bench-engines`: two engines on one pool beside two plain ones and two with the connector, in turn.

Prints a table and writes into build/bench.json.
"""

import argparse
import tempfile
from contextlib import ExitStack
from pathlib import Path

from bench.engines.kinds import Pair
from bench.engines.measured import figures
from bench.engines.seen import KINDS, Seen
from bench.figures import load, show, write
from kvharbor.demo.processes import service

SHARED_ROUNDS = 3
ALONE_ROUNDS = 5
MEMORY = "512MiB"


def main() -> None:
    """Measures everything, in one run on one machine."""
    parser = argparse.ArgumentParser(prog="python -m bench.engines", description=__doc__)
    parser.add_argument("--kinds", nargs="+", choices=KINDS[1:], default=KINDS[1:], help="beside plain ones")
    kinds = (KINDS[0], *parser.parse_args().kinds)
    busy = load("load_average_before_engines")
    with tempfile.TemporaryDirectory(prefix="kvharbor-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        socket_path = folder / "kvharbor.sock"
        stack.enter_context(service(socket_path, MEMORY))
        pairs = {kind: Pair(kind, folder, socket_path, stack) for kind in kinds}
        for pair in pairs.values():
            pair.wait_ready()
        shared: dict[str, list[Seen]] = {kind: [] for kind in kinds}
        alone: dict[str, list[list[Seen]]] = {kind: [] for kind in kinds}
        for number in range(max(SHARED_ROUNDS, ALONE_ROUNDS)):
            # Who comes first changes, so that nobody always has the quieter moment.
            order = [kinds[(number + place) % len(kinds)] for place in range(len(kinds))]
            for kind in order if number < SHARED_ROUNDS else ():
                shared[kind].append(pairs[kind].shared(number))
            for kind in order if number < ALONE_ROUNDS else ():
                alone[kind].append(pairs[kind].alone(number))
    measured = [busy, *figures(shared, alone)]
    show(measured, "kvharbor bench-engines")
    write(measured, Path("build/bench.json"), "bench-engines")


if __name__ == "__main__":
    main()
