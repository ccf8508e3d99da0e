"""`python -m chaos`: see `--help`. Exits with 1 if anything is wrong, leaked or lost."""

import argparse
import sys
import tempfile
from pathlib import Path

from chaos.run import Run
from chaos.schedule import Size


def main() -> int:
    """Runs chaos of the wanted size."""
    parser = argparse.ArgumentParser(prog="chaos", description=__doc__)
    parser.add_argument("--worker-kills", type=int, default=1000)
    parser.add_argument("--owner-kills", type=int, default=200)
    parser.add_argument("--supervisor-kills", type=int, default=0)
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1, help="the same seed strikes in the same way")
    parser.add_argument("--report", type=Path, default=Path("build/chaos.json"))
    asked = parser.parse_args()
    size = Size(asked.worker_kills, asked.owner_kills, asked.supervisor_kills, asked.workers)
    with tempfile.TemporaryDirectory(prefix="kvharbor-chaos-") as folder:
        run = Run(size, asked.seed, Path(folder))
        run.go()
    good = run.report.judge()
    run.report.write(asked.report)
    log = asked.report.with_suffix(".log")
    log.write_text(run.owner.log)
    run.report.show()
    if not good:
        sys.stderr.write(f"chaos of seed {asked.seed} found faults; the service's log is in {log}\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
