"""The run as an SVG picture: what each engine did when, and where the memory is."""

from collections.abc import Iterator
from html import escape

from kvharbor.demo.vllm.outcome import Answered, Run
from kvharbor.demo.vllm.script import FIRST, SECOND

_WIDTH, _LEFT, _RIGHT, _TOP, _LANE = 900, 96, 24, 64, 74
_BAR = 24
# Apart from each other for colour-blind readers too (Okabe and Ito).
_COMPUTED, _DECODED, _POOL, _KILLED = "#d55e00", "#56b4e9", "#009e73", "#222222"
_LOADING = "#dddddd"
_TICK_S = 5
MIB = 2**20


def picture(run: Run) -> str:
    """Returns the picture as a document of its own."""
    return _Picture(run).document()


class _Picture:
    def __init__(self, run: Run) -> None:
        self._run = run
        self._end_s = max(one.done_s for one in run.answered)
        self._lanes = {name: _TOP + _LANE * place for place, name in enumerate((FIRST, SECOND, "service"))}

    def document(self) -> str:
        height = _TOP + 3 * _LANE + 130
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" '
            'font-size="12" fill="#222222">',
            f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
            '<text x="16" y="24" font-size="14">Two vLLM engines on one pool: one is killed, and the service\'s process'
            " with it</text>",
            *self._axis(),
            *self._names(),
            *self._loading(),
            *self._service(),
            *(part for one in self._run.answered for part in self._answer(one)),
            *self._cut_off(),
            *self._memory(_TOP + 3 * _LANE + 30),
        ]
        return "\n".join([*parts, "</svg>\n"])

    def _across(self, at_s: float) -> float:
        begun_s = self._run.moments.begun_s
        return _LEFT + (at_s - begun_s) / (self._end_s - begun_s) * (_WIDTH - _LEFT - _RIGHT)

    def _axis(self) -> Iterator[str]:
        bottom = _TOP + 3 * _LANE - 16
        for after_s in range(0, int(self._end_s - self._run.moments.begun_s) + 1, _TICK_S):
            x = self._across(self._run.moments.begun_s + after_s)
            yield f'<path d="M{x:.1f} {_TOP - 20}V{bottom}" stroke="#eeeeee"/>'
            yield _text(x, bottom + 16, f"{after_s} s", anchor="middle")

    def _names(self) -> Iterator[str]:
        for name, y in self._lanes.items():
            yield _text(16, y + 16, name)

    def _bar(self, lane: str, begin_s: float, end_s: float, colour: str) -> str:
        x, width = self._across(begin_s), self._across(end_s) - self._across(begin_s)
        return f'<rect x="{x:.1f}" y="{self._lanes[lane]}" width="{width:.1f}" height="{_BAR}" fill="{colour}"/>'

    def _answer(self, one: Answered) -> Iterator[str]:
        x, y = self._across(one.asked_s), self._lanes[one.engine]
        yield self._bar(one.engine, one.asked_s, one.first_s, _COMPUTED)
        yield self._bar(one.engine, one.first_s, one.done_s, _DECODED)
        yield f'<path d="M{x:.1f} {y}v{_BAR + 5}" stroke="#222222"/>'
        yield _text(x, y + _BAR + 17, f"{len(one.prompt_ids) - one.reused_tokens}", size=11)

    def _loading(self) -> Iterator[str]:
        moments = self._run.moments
        yield self._bar(FIRST, moments.engine_killed_s, moments.engine_back_s, _LOADING)
        middle = (self._across(moments.engine_killed_s) + self._across(moments.engine_back_s)) / 2
        yield _text(middle, self._lanes[FIRST] + 16, "starts again, loads the model", anchor="middle")

    def _service(self) -> Iterator[str]:
        moments = self._run.moments
        yield self._bar("service", moments.begun_s, self._end_s, _POOL)
        yield self._bar("service", moments.service_killed_s, moments.service_back_s, "#ffffff")
        away_ms = (moments.service_back_s - moments.service_killed_s) * 1000
        yield from self._kill(
            "service", moments.service_killed_s, f"kill -9, the next one serves after {away_ms:.0f} ms"
        )

    def _cut_off(self) -> Iterator[str]:
        moments = self._run.moments
        before = [one.done_s for one in self._run.answered if one.done_s < moments.engine_killed_s]
        yield self._bar(FIRST, max(before), moments.engine_killed_s, _DECODED)
        yield from self._kill(FIRST, moments.engine_killed_s, "kill -9")

    def _kill(self, lane: str, at_s: float, label: str) -> Iterator[str]:
        x, y = self._across(at_s), self._lanes[lane]
        yield f'<path d="M{x - 5:.1f} {y - 13}l10 10m0 -10l-10 10" stroke="{_KILLED}" stroke-width="2.5"/>'
        yield _text(x + 10, y - 4, label)

    def _memory(self, top: float) -> Iterator[str]:
        """The keys of the colours, and KV memory: once, where two plain engines have it twice."""
        keys = ((_COMPUTED, "until the first token"), (_DECODED, "answering"), (_LOADING, "loading"))
        for place, (colour, text) in enumerate(keys):
            left = _LEFT + 150 * place
            yield f'<rect x="{left}" y="{top - 12}" width="14" height="14" fill="{colour}"/>'
            yield _text(left + 20, top, text)
        yield _text(_LEFT + 150 * len(keys), top, "numbers below: prompt tokens computed")
        memory = self._run.memory
        most = len(memory.engines) * memory.plain.kv_bytes
        rows = (
            ("KV memory of these two", [memory.pool_allocated_bytes], _POOL),
            ("KV memory of two plain ones", [memory.plain.kv_bytes] * len(memory.engines), _COMPUTED),
        )
        for row, (text, pieces, colour) in enumerate(rows):
            y, x = top + 28 + 30 * row, 220.0
            yield _text(16, y + 14, text)
            for piece in pieces:
                width = piece / most * 480
                yield f'<rect x="{x:.1f}" y="{y}" width="{width - 3:.1f}" height="18" fill="{colour}"/>'
                x += width
            yield _text(x + 6, y + 14, " + ".join(f"{piece / MIB:.0f} MiB" for piece in pieces))


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">{escape(text)}</text>'
