"""Asks each question in a process of its own: an answer may cost that process its context, or its life."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from gpu.measure.question import Answer, Question
from gpu.measure.report import Entry

DEADLINE_S = 150.0
_SHOWN_CHARS = 600


def ask_apart(question: Question, options: list[str], deadline_s: float = DEADLINE_S) -> Entry:
    """Runs `python -m gpu.measure --answer NAME`; returns what it found, or why it did not."""
    began_at = time.monotonic()
    command = [sys.executable, "-m", "gpu.measure", "--answer", question.name, *options]
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    ) as process:
        try:
            said, complaint = process.communicate(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            # With whatever processes it has started.
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return Entry.failed(question, f"no answer within {deadline_s:g} s", time.monotonic() - began_at)
    took_s = time.monotonic() - began_at
    if process.returncode:
        last_words = " ".join(complaint.split())[-_SHOWN_CHARS:]
        return Entry.failed(question, f"status {process.returncode}: {last_words}", took_s)
    return Entry.found(question, Answer(**json.loads(said.splitlines()[-1])), took_s)
