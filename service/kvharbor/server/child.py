"""The service's process, as the supervisor starts it: `python -m kvharbor.server.child`."""

import contextlib
import ctypes
import gc
import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
_EXIT_UNUSABLE = 2


def main() -> NoReturn:
    """Imports everything, waits until it shall serve, and does so.

    Arguments: the supervisor's pid; the descriptors of the control socket, the side listener and the lock; the flags
    and the settings file as JSON. The lock is only held: the path is owned until the last of us is gone [S5].
    """
    supervisor_pid, control_fd, listener_fd, lock_fd = (int(number) for number in sys.argv[1:5])
    _die_with(supervisor_pid)
    # The supervisor decides what a signal to the group means.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.set_inheritable(lock_fd, False)
    flags, config = json.loads(sys.argv[5])

    from kvharbor.server.configuration.logs import configure
    from kvharbor.server.configuration.sources import load_settings
    from kvharbor.server.errors import StartupError
    from kvharbor.server.supervision.control import Channel
    from kvharbor.server.supervision.supervised import Supervised

    channel = Channel.inherited(control_fd)
    try:
        loaded = load_settings(flags, os.environ, None if config is None else Path(config))
        configure(loaded.settings.log_level, loaded.settings.log_format)

        from kvharbor.server.process.service import serve

        # What is imported lives as long as the process: the collector need not look at it again.
        gc.collect()
        gc.freeze()
        supervised = Supervised.wait_for_start(channel)
        if supervised is None:
            sys.exit(0)
        listener = socket.socket(fileno=listener_fd)
        os.set_inheritable(listener_fd, False)
        serve(loaded, supervised, listener)
    except StartupError as refused:
        with contextlib.suppress(OSError):  # nobody is there to hear it
            channel.send({"unusable": str(refused)})
        sys.stderr.write(f"kvharbor: {refused}\n")
        sys.exit(_EXIT_UNUSABLE)
    sys.exit(0)


def _die_with(supervisor_pid: int) -> None:
    """Has the kernel kill this process when the supervisor dies: what nobody keeps must not be promised [S20]."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL)) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    # It may have died before.
    if os.getppid() != supervisor_pid:
        sys.exit(0)


if __name__ == "__main__":
    main()
