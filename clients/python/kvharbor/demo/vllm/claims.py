"""What the demonstration claims, each claim judged by what was seen."""

from kvharbor.demo.vllm.outcome import Claim, Run, common_tokens, whole_block_tokens
from kvharbor.demo.vllm.script import COLD, FIRST, FOLLOW_UP, MEANWHILE, SECOND, WARM

MIB = 2**20
# Of a cache. What else two processes have differs by some tens of MiB.
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
        f" served again after {(moments.service_back_s - moments.service_killed_s) * 1000:.0f} ms",
    )


def _memory(run: Run) -> list[Claim]:
    memory = run.memory
    files = sorted({file for engine in memory.engines for file in engine.kv_files})
    kv_bytes = {engine.kv_bytes for engine in memory.engines}
    shares = sum(engine.kv_share_bytes for engine in memory.engines)
    touched = " and ".join(f"{engine.kv_resident_bytes / MIB:.0f} MiB" for engine in memory.engines)
    saved = min(memory.plain.private_bytes - engine.private_bytes for engine in memory.engines)
    return [
        Claim(
            "both engines have their KV caches in one and the same memory, the pool's, which is there once",
            len(files) == 1
            and all(engine.kv_files for engine in memory.engines)
            and kv_bytes == {memory.pool_allocated_bytes}
            and shares <= memory.pool_allocated_bytes,
            f"the caches lie in {' and '.join(files)}, which takes {memory.pool_allocated_bytes / MIB:.0f} MiB;"
            f" the engines have touched {touched} of it, the kernel counts {shares / MIB:.0f} MiB for both",
        ),
        Claim(
            "and none of their own beside it, as plain vLLM has",
            not memory.plain.kv_files and saved > PRIVATE_PART * memory.plain.kv_bytes,
            f"plain vLLM has its {memory.plain.kv_bytes / MIB:.0f} MiB in memory of its own, of which it has"
            f" {saved / MIB:.0f} MiB more than each of them",
        ),
    ]
