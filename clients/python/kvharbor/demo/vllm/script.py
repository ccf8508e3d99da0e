"""What is asked of whom, by name of the question, and how its prompt comes about."""

from collections.abc import Sequence
from typing import Any

from kvharbor.demo.conversation import QUESTIONS, SYSTEM_PROMPT

FIRST, SECOND = "engine-1", "engine-2"
OPENINGS = COLD, WARM, CUT_OFF, MEANWHILE, ALONE, LAST_1, LAST_2 = QUESTIONS[:7]
FOLLOW_UP = "And what does it cost in winter?"
TOGETHER = {FIRST: LAST_1, SECOND: LAST_2}


class Prompts:
    """Token ids of the chats, by a tokenizer with the model's chat template."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def opening(self, question: str) -> list[int]:
        """Returns the prompt that begins a chat."""
        messages = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(self._tokenizer.encode(text))

    def following(self, prompt_ids: Sequence[int], answer_ids: Sequence[int], question: str) -> list[int]:
        """Returns the prompt that goes on with a chat, which it repeats token for token."""
        # SmolLM2's chat template is ChatML.
        turn = f"<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        return [*prompt_ids, *answer_ids, *self._tokenizer.encode(turn)]
