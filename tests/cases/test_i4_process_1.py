"""I4: as process 1 of a container it obeys, reaps whatever ends there, and leaves nothing behind."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from process_tree import children_of
from service_process import ServiceProcess
from waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.root]


def is_sleep(pid: int) -> bool:
    """Tells whether a process runs `sleep` by now."""
    return Path(f"/proc/{pid}/comm").read_text() == "sleep\n"


def test_as_process_1_it_obeys_and_reaps(tmp_path: Path) -> None:
    """The kernel gives process 1 no default action for a signal, and every orphan to look after."""
    if subprocess.run(["unshare", "--pid", "--fork", "true"], check=False, capture_output=True).returncode:
        pytest.skip("no PID namespace can be made here: unshare --pid fails")
    launcher = ["unshare", "--pid", "--fork", "--kill-child=KILL"]
    with ServiceProcess(tmp_path / "a.sock", "--memory=1MiB", launcher=launcher) as service:
        service.wait_for("ready")
        (first,) = children_of(service.process.pid)
        # The shell ends at once; what it has left in the background is an orphan.
        orphaning = ["nsenter", f"--target={first}", "--pid", "sh", "-c", "sleep 60 >/dev/null 2>&1 &"]
        before = set(children_of(first))
        subprocess.run(orphaning, check=True)
        orphan = until(lambda: [pid for pid in set(children_of(first)) - before if is_sleep(pid)])[0]
        os.kill(orphan, signal.SIGKILL)
        until(lambda: not Path(f"/proc/{orphan}").exists())
        os.kill(first, signal.SIGTERM)
        assert service.wait() == 0
        assert service.files() == []
