"""A vLLM engine in a process of its own, for tests: takes requests as lines of JSON and answers each with one.

python engine_main.py REPLY_FD '{"model": ..., more arguments of vllm.LLM}'
"""

import json
import os
import sys
import traceback
from typing import Any

Reply = dict[str, Any]


class EngineMain:
    """The engine and what a test may ask of it."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm import LLM

        self.llm = LLM(**arguments)
        self.calls = dict.fromkeys(("acquire", "lease"), 0)
        if os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0" and "kvharbor" in arguments.get("additional_config", ()):
            for name in self.calls:
                self._count(name)

    @property
    def scheduler(self) -> Any:
        """The scheduler, where it runs in this process."""
        core: Any = self.llm.llm_engine.engine_core
        return core.engine_core.scheduler

    def _count(self, name: str) -> None:
        calls = self.scheduler._calls
        call = getattr(calls, name)

        def counted(*arguments: Any, **keywords: Any) -> Any:
            self.calls[name] += 1
            return call(*arguments, **keywords)

        setattr(calls, name, counted)

    def generate(self, prompts: list[str], salt: str = "", **sampling: Any) -> Reply:
        """Answers prompts as one batch."""
        from vllm import SamplingParams

        asked = [{"prompt": prompt, **({"cache_salt": salt} if salt else {})} for prompt in prompts]
        parameters = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, **sampling})
        made = self.llm.generate(asked, parameters, use_tqdm=False)
        return {
            "answers": [
                {
                    "texts": [each.text for each in output.outputs],
                    "token_ids": [[*each.token_ids] for each in output.outputs],
                    "prompt_tokens": len(output.prompt_token_ids or ()),
                    "cached_tokens": output.num_cached_tokens,
                    "prompt_logprobs": len(output.prompt_logprobs or ()),
                }
                for output in made
            ]
        }

    def abort_after(self, prompt: str, steps: int) -> Reply:
        """Begins to answer a prompt and gives it up after so many steps."""
        from vllm import SamplingParams

        engine, taken = self.llm.llm_engine, 0
        engine.add_request("to-abort", prompt, SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=400))
        while engine.has_unfinished_requests():
            engine.step()
            taken += 1
            if taken == steps:
                engine.abort_request(["to-abort"])
        return {"steps": taken}

    def reset(self) -> Reply:
        """Resets the prefix cache."""
        return {"reset": self.llm.reset_prefix_cache()}

    def standing(self) -> Reply:
        """Tells what the scheduler holds and has done so far; only where it runs in this process."""
        self.scheduler._calls.flush()
        return {"held": len(self.scheduler._pool.held), "steps": self.scheduler.current_step, **self.calls}


def main() -> None:
    replies = os.fdopen(int(sys.argv[1]), "w")

    def reply(message: Reply) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    try:
        engine = EngineMain(json.loads(sys.argv[2]))
    except Exception as failure:
        reply({"failed": f"{type(failure).__name__}: {failure}", "trace": traceback.format_exc()})
        return
    reply({"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply(getattr(engine, request.pop("do"))(**request))
        except Exception as failure:
            reply({"failed": f"{type(failure).__name__}: {failure}", "trace": traceback.format_exc()})


if __name__ == "__main__":
    main()
