"""The example of the engines' README runs as it stands."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvharbor import engines
from kvharbor.engines.transformers import ModelMissing
from kvharbor.engines.transformers.model import _gguf_file
from service_process import ServiceProcess

pytestmark = [pytest.mark.slow, pytest.mark.model]
README = Path(engines.__file__).parent / "README.md"


def test_the_example_reuses_the_system_prompt_and_answers(service: ServiceProcess) -> None:
    """The second question reuses what the first computed, and three answers come of one prompt."""
    try:
        _gguf_file()
    except ModelMissing as missing:
        pytest.skip(str(missing))
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", example],
        env={**os.environ, "KVHARBOR_SOCKET": service.target, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *_, paris, rome, count = done.stdout.splitlines()
    assert "Paris" in paris
    assert "Rome" in rome
    reused = [int(line.split()[1]) for line in (paris, rome)]
    assert reused[0] == 0
    assert reused[1] >= 96
    assert count == "3"
