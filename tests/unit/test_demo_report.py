"""What the demonstration claims follows from what its workers said."""

from kvharbor.demo.report import Served, summarise


def served(worker: str, prompt: tuple[int, ...], answer: tuple[int, ...], reused: int, ttft_s: float) -> Served:
    """One answered request."""
    computed = len(prompt) - reused
    return Served(worker, "?", "!", prompt, answer, reused_tokens=reused, computed_tokens=computed, ttft_s=ttft_s)


def test_private_caches_hold_each_workers_own_copies() -> None:
    """A block that two workers used counts twice in private caches; the last answer token has no KV."""
    run = [
        served("a", (1, 2, 3, 4, 5), (6, 7), reused=0, ttft_s=2.0),
        served("b", (1, 2, 3, 4, 8), (9,), reused=4, ttft_s=0.5),
        served("b", (1, 2, 3, 4, 5), (6, 7, 7), reused=4, ttft_s=0.3),
    ]
    summary = summarise(run, block_tokens=2, block_bytes=100, kv_bytes_shared=300, identical_answers=3)
    # a: 12 34 56; b: 12 34 and 56 again: tokens 7 and 9 were chosen last and never computed.
    assert (summary.workers, summary.requests) == (2, 3)
    assert summary.kv_bytes_private == 600
    assert (summary.prompt_tokens, summary.reused_tokens, summary.computed_tokens) == (15, 8, 7)
    assert (summary.ttft_cold_s, summary.ttft_warm_s) == (2.0, 0.4)
