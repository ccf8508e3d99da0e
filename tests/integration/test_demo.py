"""`make demo` from end to end: the main job, with the real model."""

import json
import subprocess
import sys

import pytest

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
    summary = json.loads(done.stdout)
    assert summary.keys() == FIELDS
    assert summary["workers"] == 3
    assert summary["identical_answers"] == summary["requests"] >= 6
    assert summary["reused_tokens"] + summary["computed_tokens"] == summary["prompt_tokens"]
    assert summary["reused_tokens"] > summary["computed_tokens"]
    assert summary["ttft_warm_s"] < summary["ttft_cold_s"]
    assert summary["kv_bytes_shared"] < summary["kv_bytes_private"]
