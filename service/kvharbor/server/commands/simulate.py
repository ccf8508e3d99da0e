"""`kvharbor simulate`: how many requests some memory serves, by how it is given out."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvharbor.server.errors import CommandError
from kvharbor.server.sizes import parse_size

if TYPE_CHECKING:
    from kvharbor.server.simulate.drawn import Lengths, Span
    from kvharbor.server.simulate.layouts import Layout
    from kvharbor.server.simulate.report import Finding
    from kvharbor.server.simulate.room import Room
    from kvharbor.server.traces.trace import Trace

_DRAWN_SLOT_TOKENS = 2048
_KV_BITS = 16
_SPAN = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?", re.ASCII)


def simulate(
    memory: Annotated[str, typer.Option("--memory", help="Of the card, for weights and KV: 16GB, 80GiB.")],
    weights: Annotated[str | None, typer.Option("--weights", help="What the weights take of it, e.g. 6.5GB.")] = None,
    token_bytes: Annotated[
        int | None, typer.Option("--token-bytes", min=1, help="KV bytes of a token, instead of the model's shape.")
    ] = None,
    layers: Annotated[int | None, typer.Option("--layers", min=1, help="Of the model, with KV.")] = None,
    kv_heads: Annotated[int | None, typer.Option("--kv-heads", min=1, help="In a layer.")] = None,
    head_dim: Annotated[int | None, typer.Option("--head-dim", min=1, help="Elements of a K or V of one head.")] = None,
    kv_bits: Annotated[
        int | None, typer.Option("--kv-bits", min=1, help="Bits of an element of K or V. Default: 16.")
    ] = None,
    slot_tokens: Annotated[
        int | None,
        typer.Option(
            "--slot-tokens", min=1, help="Tokens of a static slot. Default: the longest request of the trace, or 2048."
        ),
    ] = None,
    block_tokens: Annotated[
        list[int] | None,
        typer.Option("--block-tokens", min=1, help="Tokens a block. Repeatable. Default: the trace's, or 64."),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Lengths, arrivals and what is shared: docs/traces.md has formats.")
    ] = None,
    prompt_tokens: Annotated[str, typer.Option("--prompt-tokens", help="Without a trace: 400, or 100-700.")] = "256",
    output_tokens: Annotated[str, typer.Option("--output-tokens", help="Without a trace.")] = "200-500",
    shared_tokens: Annotated[
        int, typer.Option("--shared-tokens", min=0, help="Without a trace: tokens that all prompts begin with.")
    ] = 0,
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", min=1, help="Tells also what memory so many at once need.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="For lengths that are drawn.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
) -> None:
    """Compares static slots, paged blocks, and paged blocks with shared prefixes, without any service.

    Requests count at their full length, so that none has to make way for another. How many fit at once is told for
    requests that follow each other in the trace; with a trace also how long they wait when they come as it says.

    Of the memory for KV: `written` is in use at that moment, `unused` reserved and never written, `left over` too
    little for one more. `too long`: requests left out as no slot, or not all the memory, has room for them. `N need`:
    what --concurrency at once take. `wait`: share of the requests that wait, `mean wait`: over all of them.
    """
    from kvharbor.server.simulate.drawn import Lengths
    from kvharbor.server.simulate.room import Room

    room = Room(
        _bytes("--memory", memory),
        _bytes("--weights", weights) if weights else 0,
        _token_bytes(token_bytes, layers, kv_heads, head_dim, kv_bits),
    )
    lengths = Lengths(_span("--prompt-tokens", prompt_tokens), _span("--output-tokens", output_tokens), shared_tokens)
    if trace is None and shared_tokens > lengths.prompt.most:
        raise CommandError(
            f"--shared-tokens is {shared_tokens}, and no prompt has more than {lengths.prompt.most} tokens: share "
            f"less, or raise --prompt-tokens"
        )
    asked = _Asked(room, concurrency, has_arrivals=trace is not None)
    traces = [_trace(trace, lengths, size, seed) for size in block_tokens or (None,)]
    findings = list(_findings(traces, slot_tokens or _longest(traces[0], is_drawn=trace is None), asked))
    if as_json:
        found = [one.record() for one in findings]
        typer.echo(json.dumps({"kv_bytes": room.kv_bytes, "token_bytes": room.token_bytes, "layouts": found}))
        return

    from rich.console import Console

    from kvharbor.server.simulate.report import table_of

    Console().print(table_of(room, findings, concurrency))


def _longest(trace: "Trace", *, is_drawn: bool) -> int:
    """Returns what a slot has to hold: in a real system what the model allows, which a trace can only hint at."""
    return _DRAWN_SLOT_TOKENS if is_drawn else max(one.input_tokens + one.output_tokens for one in trace.requests)


@dataclass(frozen=True, slots=True)
class _Asked:
    """What is to be found out of each layout."""

    room: "Room"
    concurrency: int | None
    has_arrivals: bool


def _findings(traces: "Sequence[Trace]", slot_tokens: int, asked: _Asked) -> "Iterator[Finding]":
    """Tries a static layout, and for each size of blocks the paged ones."""
    from kvharbor.server.simulate.layouts import Layout

    yield _finding(traces[0], Layout.static(slot_tokens), asked)
    for trace in traces:
        yield _finding(trace, Layout.paged(trace.block_tokens), asked)
        # Lengths alone do not tell what could be shared.
        if trace.unique_block_count:
            yield _finding(trace, Layout.shared(trace.block_tokens), asked)


def _finding(trace: "Trace", layout: "Layout", asked: _Asked) -> "Finding":
    from kvharbor.server.simulate.fits import bytes_needed, fit
    from kvharbor.server.simulate.report import Finding
    from kvharbor.server.simulate.waits import waits

    room, concurrency = asked.room, asked.concurrency
    return Finding(
        fit(trace.requests, layout, room),
        None if concurrency is None else bytes_needed(trace.requests, layout, room.token_bytes, concurrency),
        waits(trace.requests, layout, room) if asked.has_arrivals else None,
    )


def _trace(file: Path | None, lengths: "Lengths", block_tokens: int | None, seed: int) -> "Trace":
    from kvharbor.server.simulate.drawn import drawn
    from kvharbor.server.traces.reading import DEFAULT_BLOCK_TOKENS, read_lengths

    if file is None:
        return drawn(lengths, block_tokens or DEFAULT_BLOCK_TOKENS, seed)
    return read_lengths(file, block_tokens)


def _token_bytes(
    token_bytes: int | None, layers: int | None, kv_heads: int | None, head_dim: int | None, kv_bits: int | None
) -> int:
    from kvharbor.server.simulate.room import ModelShape

    if token_bytes is not None:
        shape = {"--layers": layers, "--kv-heads": kv_heads, "--head-dim": head_dim, "--kv-bits": kv_bits}
        given = [option for option, value in shape.items() if value is not None]
        if given:
            raise CommandError(f"--token-bytes says all of it: leave out {', '.join(given)}, or --token-bytes")
        return token_bytes
    if layers is None or kv_heads is None or head_dim is None:
        raise CommandError("say how large KV is: --token-bytes, or --layers, --kv-heads and --head-dim")
    return ModelShape(layers, kv_heads, head_dim, kv_bits or _KV_BITS).token_bytes


def _bytes(option: str, text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as wrong:
        raise CommandError(f"{option}: {wrong}") from None


def _span(option: str, text: str) -> "Span":
    from kvharbor.server.simulate.drawn import Span

    form = _SPAN.fullmatch(text.strip())
    if form is None or not 1 <= int(form[1]) <= int(form[2] or form[1]):
        raise CommandError(f"{option} is {text[:40]!r}: write a number of tokens from 1 on, 400, or two, 100-700")
    return Span(int(form[1]), int(form[2] or form[1]))
