"""`make demo-vllm`: runs it, tells the story, and ends with status 1 unless every claim has held."""

import argparse
import dataclasses
import json
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from transformers import AutoTokenizer

from kvharbor.demo.processes import DemoFailed
from kvharbor.demo.vllm.claims import claims
from kvharbor.demo.vllm.outcome import Claim, Run
from kvharbor.demo.vllm.picture import picture
from kvharbor.demo.vllm.play import Play
from kvharbor.demo.vllm.screen import Teller
from kvharbor.demo.vllm.script import Prompts
from kvharbor.demo.vllm.stage import stage
from kvharbor.engines.transformers import smollm2_folder


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m kvharbor.demo.vllm", description=__doc__)
    parser.add_argument("--json", action="store_true", help="end standard output with one JSON object")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the run into this file, as SVG")
    parser.add_argument("--most-tokens", type=int, default=48, metavar="N", help="length of an answer (default: 48)")
    options = parser.parse_args()
    console = Console(stderr=options.json)
    teller = Teller(console)
    prompts = Prompts(AutoTokenizer.from_pretrained(smollm2_folder()))
    try:
        with tempfile.TemporaryDirectory(prefix="kvharbor-demo-") as folder, stage(Path(folder)) as processes:
            run = Play(processes, prompts, teller, options.most_tokens).run()
    except DemoFailed as failed:
        console.print(str(failed), style="red", markup=False)
        return 1
    judged = claims(run)
    teller.claims(judged)
    if options.picture:
        options.picture.write_text(picture(run))
    if options.json:
        sys.stdout.write(json.dumps(_as_json(run, judged)) + "\n")
    return 0 if all(claim.held for claim in judged) else 1


def _as_json(run: Run, judged: list[Claim]) -> dict[str, object]:
    told = dataclasses.asdict(run)
    told["identical_count"] = run.identical_count
    told["claims"] = [dataclasses.asdict(claim) for claim in judged]
    return told


if __name__ == "__main__":
    raise SystemExit(main())
