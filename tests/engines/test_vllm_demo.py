"""`make demo-vllm` from end to end, with short answers."""

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.model, pytest.mark.timeout(900)]


def test_two_engines_share_one_pool_and_every_claim_holds(tmp_path: Path) -> None:
    """Standard output is the JSON object, and the picture is one."""
    picture = tmp_path / "run.svg"
    command = [sys.executable, "-m", "kvharbor.demo.vllm", "--json", "--picture", str(picture), "--most-tokens", "40"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=880, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert [claim["seen"] for claim in told["claims"] if not claim["held"]] == []
    assert len(told["claims"]) == 6
    assert told["identical_count"] == len(told["answered"]) == 8
    assert told["restart_count"] == 1
    assert ElementTree.parse(picture).getroot().tag == "{http://www.w3.org/2000/svg}svg"
