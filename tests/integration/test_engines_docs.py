"""The example of docs/engines.md runs as it stands."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvharbor.engines.transformers import ModelMissing, smollm2_folder
from service_process import ServiceProcess

pytestmark = [pytest.mark.slow, pytest.mark.model]
PAGE = Path(__file__).parents[2] / "docs" / "engines.md"


def test_the_example_answers(service: ServiceProcess) -> None:
    """Two prompts, two answers."""
    try:
        smollm2_folder()
    except ModelMissing as missing:
        pytest.skip(str(missing))
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", example],
        env={**os.environ, "KVHARBOR_SOCKET": service.target, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert "Rome" in done.stdout
