"""What happens when the pool's state is not known any more."""

import subprocess
import sys

import pytest

from kvharbor.server.supervision.restarts import EXIT_BUG


@pytest.mark.slow
def test_a_broken_rule_ends_the_process_with_its_own_status() -> None:
    """The log has the cause; nothing is tidied up by code that can no longer be trusted."""
    program = (
        "import atexit; from kvharbor.server.supervision import crash; from kvharbor.server.configuration import logs\n"
        "logs.configure('info', 'json')\n"
        "from kvharbor.pool.errors import InvariantViolation\n"
        "atexit.register(print, 'tidied')\n"
        "crash.crash(InvariantViolation(rule='G5', detail='9 of 10 blocks'))\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (EXIT_BUG, "")
    assert "[G5] 9 of 10 blocks" in ended.stderr
