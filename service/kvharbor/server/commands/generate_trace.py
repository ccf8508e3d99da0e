"""`kvharbor generate-trace`: a trace for those who have none."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvharbor.server.commands.options import ForceOption, require_new
from kvharbor.server.errors import CommandError

if TYPE_CHECKING:
    from kvharbor.server.traces.recording import Recorded


def generate_trace(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write it; as gzip if the name ends with .gz.")],
    conversations: Annotated[int, typer.Option("--conversations", min=1, max=1_000_000)] = 500,
    system_prompts: Annotated[
        int, typer.Option("--system-prompts", min=1, max=100_000, help="How many they share; a few of them are common.")
    ] = 20,
    per_minute: Annotated[float, typer.Option("--per-minute", min=0.001, help="Conversations that begin.")] = 20.0,
    block_tokens: Annotated[int, typer.Option("--block-tokens", min=1, help="Tokens a block.")] = 64,
    seed: Annotated[int, typer.Option("--seed", help="The same seed gives the same trace.")] = 1,
    force: ForceOption = False,
) -> None:
    """Writes a made-up trace of conversations of several turns, each behind a system prompt that others have too."""
    from kvharbor.server.traces.generated import Shape, generate
    from kvharbor.server.traces.recording import write

    require_new(file, force=force)
    shape = Shape(
        conversation_count=conversations,
        system_prompt_count=system_prompts,
        block_tokens=block_tokens,
        conversations_per_minute=per_minute,
        seed=seed,
    )
    count = 0

    def counted() -> "Iterator[Recorded]":
        nonlocal count
        for request in generate(shape):
            count += 1
            yield request

    try:
        write(file, block_tokens, counted())
    except OSError as failure:
        raise CommandError(f"cannot write {file}: {failure.strerror}") from None
    # Not on stdout, which may be the file.
    typer.echo(f"{file}: {count:,} requests of {conversations:,} conversations, in blocks of {block_tokens}", err=True)
