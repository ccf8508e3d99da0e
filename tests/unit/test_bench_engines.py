"""The figures of engines follow from what they have answered, and all kinds are asked the same."""

import itertools

from bench.engines.measured import figures
from bench.engines.seen import KINDS, Seen
from bench.engines.traffic import alone, chats
from kvharbor.demo.vllm.outcome import Answered


def seen(seconds: float, reused: int, admission_us: float, decode_us: float) -> Seen:
    """Two answers of 10 tokens to prompts of 100, one after the other, in so many seconds."""
    answers = [
        Answered(
            "engine", f"{place}", (1,) * 100, (2,) * 10, "", reused, start, start + seconds / 4, start + seconds / 2
        )
        for place, start in enumerate((0.0, seconds / 2))
    ]
    return Seen(tuple(answers), (admission_us,), (decode_us,))


def test_figures_follow_from_the_rounds() -> None:
    """Speeds are compared wave by wave, times of steps in the median, the first wave of a round by itself."""
    shared = {kind: [seen(2.0, reused, 0, 0)] for kind, reused in zip(KINDS, (0, 64, 64), strict=True)}
    alone_rounds = {
        "plain": [[seen(2.0, 0, 150, 10), seen(4.0, 0, 100, 10)]],
        "pool": [[seen(2.5, 0, 800, 99), seen(5.0, 0, 400, 11)]],
        "copy": [[seen(4.0, 0, 1050, 99), seen(8.0, 0, 900, 30)]],
    }
    made = {figure.name: figure.value for figure in figures(shared, alone_rounds)}
    assert (made["shared_computed_tokens_plain"], made["shared_computed_tokens_pool"]) == (200, 72)
    # Both prompts are the same one: the second computes 100 - 64.
    assert (made["shared_computed_over_once_plain"], made["shared_computed_over_once_pool"]) == (200 / 136, 72 / 136)
    assert made["shared_ttft_p50_ms_pool"] == 500
    assert (made["alone_tokens_per_s_pool_over_plain"], made["alone_tokens_per_s_copy_over_plain"]) == (0.8, 0.5)
    assert (made["admission_extra_us_pool"], made["decode_extra_us_copy"]) == (300, 20)
    assert (made["admission_after_idle_extra_us_pool"], made["admission_after_idle_extra_us_copy"]) == (650, 900)
    assert made["kv_mib_plain"] == 2 * made["kv_mib_pool"]


def test_rounds_are_the_same_for_everybody_and_never_repeat() -> None:
    """Chats of one system prompt begin alike, those of two do not."""
    first = [*chats(0)]
    assert first == [*chats(0)]
    assert len({chat.said for chat in first}) == 2
    assert {chat.said for chat in first}.isdisjoint(chat.said for chat in chats(1))
    assert first[0].turn(0).said != first[1].turn(0).said
    asked = itertools.product(range(2), repeat=3)
    prompts = [tuple(ids) for number, wave, engine in asked for ids in alone(number, wave, engine).values()]
    assert len({*prompts}) == len(prompts)
