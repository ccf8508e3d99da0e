"""`make bench-page`: puts build/bench.json into docs/performance.md, as tables and pictures."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from bench.bars import Bar, picture
from bench.figures import Figure

FIGURES = Path("build/bench.json")
PAGE = Path("docs/performance.md")
IMAGES = Path("docs/images")
COMMANDS = ("bench", "bench-peers", "bench-engines")
# Of each: what is compared, and the names of the figures in microseconds.
BESIDE_PEERS = (
    ("2,048 tokens that are there, 16 a block", "vllm_us_2048_b16", "pool_warm_us_2048_b16"),
    ("2,048 tokens that are there, 64 a block", "vllm_us_2048_b64", "pool_warm_us_2048_b64"),
    ("2,048 new tokens, 16 a block", "vllm_cold_us_2048_b16", "pool_cold_us_2048_b16"),
    ("2,048 new tokens, 64 a block", "vllm_cold_us_2048_b64", "pool_cold_us_2048_b64"),
    ("8,192 tokens over the socket", "vllm_hash_and_manager_us_8192_b16", "socket_us_8192_b16"),
    ("2,048 tokens over the socket", "lmcache_lookup_us_2048", "allocate_us_2048"),
    ("64 MiB until attention", "lmcache_retrieve_us_64mib", "attend_us_64mib"),
)


def main() -> None:
    """Rewrites what is between the page's marks, and the pictures."""
    page = PAGE.read_text()
    figures: dict[str, Figure] = {}
    for command in COMMANDS:
        measured = _measured(command)
        figures |= {figure.name: figure for figure in measured}
        page = between(page, command, table(measured))
    PAGE.write_text(page)
    (IMAGES / "performance-aims.svg").write_text(_aims(figures.values()))
    (IMAGES / "performance-peers.svg").write_text(_peers(figures))


def _measured(command: str) -> list[Figure]:
    entries = json.loads(FIGURES.read_text())
    found = [entry for entry in entries if entry.pop("command") == command]
    if not found:
        raise RuntimeError(f"run make {command} first")
    return [Figure(**entry) for entry in found]


def between(page: str, command: str, text: str) -> str:
    """Returns the page with another text between the marks of a command."""
    begin, end = f"<!-- {command} -->", f"<!-- end of {command} -->"
    changed, count = re.subn(f"{begin}.*?{end}", lambda _: f"{begin}\n{text}\n{end}", page, flags=re.DOTALL)
    if count != 1:
        raise RuntimeError(f"{PAGE} has {count} places for {command}")
    return changed


def table(figures: Sequence[Figure]) -> str:
    """Returns figures as a table of Markdown."""
    lines = ["| figure | value | aim | |", "|---|---|---|---|"]
    for figure in figures:
        sign = "≤" if figure.better == "lower" else "≥"
        aim = "" if figure.aim is None else f"{sign} {figure.aim:,g}"
        reached = {None: "", True: "reached", False: "**missed**"}[figure.reached]
        lines.append(f"| `{figure.name}` | {_value(figure)} | {aim} | {reached} |")
    return "\n".join(lines)


def _value(figure: Figure) -> str:
    unit = {"ratio": "", "us": " µs"}.get(figure.unit, f" {figure.unit}")
    return f"{_digits(figure.value)}{unit}"


def _digits(value: float) -> str:
    """Three of them that mean something, and no exponents."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _aims(figures: Iterable[Figure]) -> str:
    bars = []
    for figure in figures:
        if figure.aim:  # what aims at nothing has no ratio
            over = figure.value / figure.aim if figure.better == "lower" else figure.aim / figure.value
            bars.append(Bar(figure.name, over, f"{over:.2f}", 0 if figure.reached else 1))
    return picture("What was measured, over what was aimed at", "left of the line: reached", bars, line=1.0)


def _peers(figures: Mapping[str, Figure]) -> str:
    bars = []
    for what, theirs, ours in BESIDE_PEERS:
        peer = "LMCache" if theirs.startswith("lmcache") else "vLLM"
        pair = ((f"{what}: {peer}", theirs, 1), ("kvharbor", ours, 0))
        bars += [
            Bar(label, figures[name].value, f"{_digits(figures[name].value)} µs", colour)
            for label, name, colour in pair
        ]
    return picture("Beside vLLM 0.33, with its hashes, and LMCache 0.5.6", "microseconds", bars)


if __name__ == "__main__":
    main()
