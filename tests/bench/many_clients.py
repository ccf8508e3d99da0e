"""Calls a second that the service takes from several client processes at once, against empty ones."""

from contextlib import ExitStack
from pathlib import Path

from bench.drivers import Driver, driver, ours
from bench.figures import Figure, interleaved

CLIENTS = 8
WINDOW_S = 0.5
TOKENS = 2_048
BLOCK_TOKENS = 64
BLOCK_COUNT = 1_024


def measure(socket_path: Path, rounds: int) -> list[Figure]:
    """Measures `calls_8_clients_over_empty`: each client allocates and releases a prompt of its own."""
    with ExitStack() as stack:
        clients = [
            stack.enter_context(driver(f"client {number}", _command(socket_path, number))) for number in range(CLIENTS)
        ]
        samples = {kind: lambda kind=kind: _calls_per_s(clients, kind) for kind in ("empty", "pair")}
        interleaved(samples, 1)
        taken = interleaved(samples, rounds)
    return [
        Figure("empty_calls_per_s_8_clients", taken["empty"], "1/s", None, "higher"),
        Figure("calls_8_clients_over_empty", taken["pair"] / taken["empty"], "ratio", 0.7, "higher"),
    ]


def _command(socket_path: Path, number: int) -> list[str]:
    sizes = (BLOCK_TOKENS, BLOCK_COUNT, number * TOKENS, TOKENS)
    return ours("bench.client_driver", str(socket_path), "many-clients", *map(str, sizes))


def _calls_per_s(clients: list[Driver], kind: str) -> float:
    for client in clients:
        client.send(do=kind, seconds=WINDOW_S)
    return sum(client.answer()["calls_per_s"] for client in clients)
