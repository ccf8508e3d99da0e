"""What the demonstration claims, each claim judged by what was seen."""

from kvharbor.demo.vllm.outcome import Claim, Run, common_tokens, whole_block_tokens
from kvharbor.demo.vllm.script import COLD, FOLLOW_UP, FIRST, MEANWHILE, SECOND, WARM

MIB = 2**20
# What two equal processes differ by is a few percent of a cache.
PRIVATE_PART = 0.75


def claims(run: Run) -> list[Claim]:
    """Judges a run."""
    return [_same_texts(run), _warm_start(run), _warm_again(run), _went_on(run), *_memory(run)]


def _same_texts(run: Run) -> Claim:
    count, total = run.identical_count, len(run.answered)
    return Claim("every answer is plain vLLM's, token for token", count == total, f"{count} of {total}")


def _warm_start(run: Run) -> Claim:
    cold, warm = run.answer(FIRST, COLD), run.answer(SECOND, WARM)
    shared = common_tokens(cold.prompt_ids, warm.prompt_ids) // run.block_tokens * run.block_tokens
    return Claim(
        "the second engine starts warm: what the first has computed it does not compute again",
        cold.reused_tokens == 0 and warm.reused_tokens == shared > 0,
        f"{warm.reused_tokens} of {len(warm.prompt_ids)} prompt tokens were there, and can be: {shared};"
        f" first token after {warm.ttft_s:.2f} s instead of {cold.ttft_s:.2f} s",
    )


def _warm_again(run: Run) -> Claim:
    before, after = run.answer(FIRST, COLD), run.answer(FIRST, FOLLOW_UP)
    # The last token of an answer was chosen and never computed.
    had = before.prompt_ids + before.answer_ids[:-1]
    could = min(len(had) // run.block_tokens * run.block_tokens, whole_block_tokens(after.prompt_ids, run.block_tokens))
    return Claim(
        "the engine that was killed with -9 comes back warm, with what it had computed itself too",
        after.reused_tokens == could > 0,
        f"{after.reused_tokens} of {len(after.prompt_ids)} prompt tokens were there, and can be: {could}",
    )


def _went_on(run: Run) -> Claim:
    meanwhile, moments = run.answer(SECOND, MEANWHILE), run.moments
    across = meanwhile.first_s < moments.service_killed_s < meanwhile.done_s
    return Claim(
        "the service's process is killed while an engine answers, and the engine goes on in its session",
        across and run.sessions_went_on and run.restart_count == 1,
        f"killed {moments.service_killed_s - meanwhile.first_s:.1f} s after the first token of an answer that ended"
        f" {meanwhile.done_s - moments.service_killed_s:.1f} s later;"
        f" served again after {moments.service_back_s - moments.service_killed_s:.1f} s",
    )


def _memory(run: Run) -> list[Claim]:
    memory = run.memory
    arenas = [engine.arena for engine in memory.engines]
    files = {arena.file for arena in arenas if arena}
    once = len(files) == 1 and None not in arenas and memory.pool_allocated_bytes < 1.1 * memory.pool_bytes
    saved = min(memory.plain.private_bytes - engine.private_bytes for engine in memory.engines)
    mapped = " and ".join(f"{arena.resident_bytes / MIB:.0f} MiB" for arena in arenas if arena)
    shares = sum(arena.share_bytes for arena in arenas if arena)
    return [
        Claim(
            "both engines map one and the same memory, which is there once",
            once and shares <= memory.pool_allocated_bytes,
            f"{len(files)} file of {memory.pool_allocated_bytes / MIB:.0f} MiB; they have {mapped} of it mapped in,"
            f" together {shares / MIB:.0f} MiB",
        ),
        Claim(
            "and neither has a KV cache of its own beside it",
            saved >= PRIVATE_PART * memory.pool_bytes,
            f"each has {saved / MIB:.0f} MiB less of its own than plain vLLM with a cache of"
            f" {memory.pool_bytes / MIB:.0f} MiB",
        ),
    ]
