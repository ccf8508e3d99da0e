"""The short form of `make chaos`: real processes are killed for some seconds, and nothing may be wrong or lost."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]

_TESTS = Path(__file__).parent.parent
EXERCISED = (
    "hits_verified",
    "tails_verified",
    "evicted_blocks",
    "forks",
    "adoptions",
    "invariants_checked",
    "engine_hits_verified",
    "engine_opaque_blocks_verified",
    "engine_resumed_blocks_verified",
    "engine_released_blocks",
    "engine_recalls",
    "engine_holdings_compared",
    "decoded_blocks_verified",
)


def run_chaos(report: Path, **numbers: int) -> dict[str, Any]:
    """Runs chaos of a size, expects success, and returns its figures."""
    arguments = [f"--{name.replace('_', '-')}={number}" for name, number in numbers.items()]
    command = [sys.executable, "-m", "chaos", f"--report={report}", *arguments]
    paths = os.pathsep.join((str(_TESTS), *filter(None, [os.environ.get("PYTHONPATH")])))
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=140, check=False
    )
    log = report.with_suffix(".log")
    assert done.returncode == 0, done.stdout + done.stderr + (log.read_text()[-4000:] if log.exists() else "")
    figures: dict[str, Any] = json.loads(report.read_text())
    return figures


def test_nothing_is_wrong_leaked_or_lost_while_workers_and_the_owner_are_killed(tmp_path: Path) -> None:
    """G1, G2, G3, G5, G6, G7: at random instants and at marked points."""
    figures = run_chaos(tmp_path / "chaos.json", worker_kills=24, owner_kills=6, workers=4, seed=12)
    assert figures["worker_kills"] >= 24
    assert figures["owner_kills"] >= 6
    assert all(figures[name] > 0 for name in EXERCISED), figures
    assert bool(figures["indexes_compared"]) == bool(figures["index_entries_compared"])
    assert figures["standby_kills"] == 1
    assert figures["marked_kills"]
    assert figures["recovery_samples"] > 0
    assert figures["reclaim_samples"] > 0


def test_a_killed_supervisor_is_a_cold_start_and_nothing_is_wrong(tmp_path: Path) -> None:
    """Workers go on in the new epoch, and verify every byte there."""
    figures = run_chaos(tmp_path / "chaos.json", worker_kills=4, owner_kills=0, supervisor_kills=1, workers=3, seed=8)
    assert figures["supervisor_kills"] == 1
    assert figures["new_epochs"] > 0
