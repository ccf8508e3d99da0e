"""`python -m gpu.measure`: asks what only a device can answer, prints a table, writes build/gpu.json.

Ends with status 1 if a question has no answer, 2 without a device. `--dry-run` goes through the motions on the stub of
the driver.
"""

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from gpu.measure import report
from gpu.measure.asking import ask_apart
from gpu.measure.questions import QUESTIONS
from gpu.rig import Rig
from kvharbor.gpumem import CudaUnavailable
from kvharbor.gpumem.ipc_runtime import RUNTIME_VARIABLE, RUNTIMES


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status."""
    options = _parser().parse_args(arguments)
    if options.list:
        sys.stdout.writelines(f"{question.name}: {question.text}\n" for question in QUESTIONS.values())
        return 0
    try:
        rig = Rig.stub() if options.dry_run else Rig.hardware(options.runtime)
    except CudaUnavailable as unavailable:
        sys.stderr.write(f"{unavailable}\n")
        return 2
    if options.answer:
        os.environ[RUNTIME_VARIABLE] = rig.cuda.runtime  # for what this process maps itself
        sys.stdout.write(json.dumps(asdict(QUESTIONS[options.answer].ask(rig))) + "\n")
        return 0
    passed_on = ["--dry-run"] if options.dry_run else ["--runtime", options.runtime]
    entries = [
        ask_apart(QUESTIONS[name], passed_on)
        for name in options.only or QUESTIONS
        if rig.on_hardware or not QUESTIONS[name].needs_hardware
    ]
    surroundings = report.surroundings_of(rig)
    report.show(surroundings, entries)
    out = options.out or Path("build/gpu-dry-run.json" if options.dry_run else "build/gpu.json")
    report.write(out, surroundings, entries)
    return 0 if all(entry.answered for entry in entries) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m gpu.measure", description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="say which questions there are, and end")
    parser.add_argument("--only", action="append", choices=QUESTIONS, help="ask this one; may be repeated")
    parser.add_argument("--answer", choices=QUESTIONS, help="answer one in this process, as JSON on stdout")
    parser.add_argument("--runtime", choices=RUNTIMES, default=RUNTIMES[0], help="whose calls CUDA IPC makes")
    parser.add_argument("--dry-run", action="store_true", help="on the stub of the driver: no figure means anything")
    parser.add_argument("--out", type=Path, help="default: build/gpu.json, of a dry run build/gpu-dry-run.json")
    return parser


if __name__ == "__main__":
    sys.exit(main())
