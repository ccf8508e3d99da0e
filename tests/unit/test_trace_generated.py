"""Traces that are made up."""

from pathlib import Path

from kvharbor.server.traces.generated import Shape, generate
from kvharbor.server.traces.reading import read_trace
from kvharbor.server.traces.recording import Recorded, write

SHAPE = Shape(conversation_count=20, system_prompt_count=3, seed=7)


def test_the_same_seed_gives_the_same_requests() -> None:
    """And another seed others."""
    other = Shape(conversation_count=20, system_prompt_count=3, seed=8)
    assert list(generate(SHAPE)) == list(generate(SHAPE)) != list(generate(other))


def test_a_conversation_goes_on_behind_what_was_said() -> None:
    """Each request but the first of a conversation begins with another's whole blocks, and arrives after its end."""
    earlier: list[Recorded] = []
    openings = 0
    for request in generate(SHAPE):
        turns = [
            one
            for one in earlier
            if one.block_hashes == request.block_hashes[: len(one.block_hashes)]
            and one.input_tokens + one.output_tokens < request.input_tokens
            and one.arrival_ms + one.duration_ms <= request.arrival_ms
        ]
        openings += not turns
        earlier.append(request)
    assert openings <= SHAPE.conversation_count < len(earlier)


def test_conversations_share_system_prompts(tmp_path: Path) -> None:
    """There are no more first blocks than system prompts."""
    file = tmp_path / "made.jsonl"
    write(file, SHAPE.block_tokens, generate(SHAPE))
    trace = read_trace(file)
    assert len({request.block_names[0] for request in trace.requests}) <= SHAPE.system_prompt_count
    arrivals = [request.arrival_ms for request in trace.requests]
    assert arrivals == sorted(arrivals)
    assert all(len(one.block_names) == one.input_tokens // SHAPE.block_tokens for one in trace.requests)
