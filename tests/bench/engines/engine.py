"""A vLLM engine that times its scheduler's steps: that of the demonstration, and told when it is idle.

`admission_us` has a time for each request that was admitted, `decode_us` one for each step of decoding alone: that of
`schedule` and `update_from_output` together, without the model.
"""

import time
from typing import Any

from kvharbor.demo.vllm.engine import main


class StepTimes:
    """Times the steps of an engine whose scheduler runs in this process."""

    def __init__(self, llm: Any) -> None:
        self._scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        self._schedule = self._scheduler.schedule
        self._update = self._scheduler.update_from_output
        self._scheduler.schedule = self._timed_schedule
        self._scheduler.update_from_output = self._timed_update
        self._admission_us: list[float] = []
        self._decode_us: list[float] = []
        self._scheduled_s = 0.0

    def __call__(self) -> dict[str, Any]:
        """Returns the times since the last call."""
        told = {"admission_us": self._admission_us, "decode_us": self._decode_us}
        self._admission_us, self._decode_us = [], []
        return told

    def _timed_schedule(self, *arguments: Any, **keywords: Any) -> Any:
        start = time.perf_counter()
        output = self._schedule(*arguments, **keywords)
        self._scheduled_s = time.perf_counter() - start
        return output

    def _timed_update(self, scheduled: Any, *arguments: Any, **keywords: Any) -> Any:
        start = time.perf_counter()
        outputs = self._update(scheduled, *arguments, **keywords)
        took_us = (time.perf_counter() - start + self._scheduled_s) * 1e6
        admitted = len(scheduled.scheduled_new_reqs)
        if admitted:
            self._admission_us += [took_us / admitted] * admitted
        elif scheduled.total_num_scheduled_tokens == len(scheduled.num_scheduled_tokens):
            self._decode_us.append(took_us)
        return outputs


if __name__ == "__main__":
    main(StepTimes)
