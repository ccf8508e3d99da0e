"""The demonstration from start to end."""

import dataclasses
import json
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from kvharbor.client import connect
from kvharbor.demo.conversation import conversations
from kvharbor.demo.processes import WorkerProcess, service, workers
from kvharbor.demo.report import Served, Summary, summarise
from kvharbor.demo.screen import progress, show_served, show_summary
from kvharbor.demo.worker import BLOCK_TOKENS, POOL

WORKER_COUNT = 3
MEMORY = "512MiB"
MAX_NEW_TOKENS = 48


def run(*, as_json: bool) -> Summary:
    """Runs the demonstration and returns its summary; with `as_json` standard output ends with that as JSON.

    Progress and answers go to standard error then, so that standard output is the JSON object alone.
    """
    console = Console(stderr=as_json)
    with tempfile.TemporaryDirectory(prefix="kvharbor-demo-") as folder:
        socket_path = Path(folder) / "kvharbor.sock"
        with service(socket_path, MEMORY), workers(socket_path, WORKER_COUNT) as crew:
            block_bytes = _load(console, crew)
            served = _serve(console, crew)
            kv_bytes_shared = _used_bytes(socket_path)
            identical_answers = _verify(console, crew, served)
    summary = summarise(
        served,
        block_tokens=BLOCK_TOKENS,
        block_bytes=block_bytes,
        kv_bytes_shared=kv_bytes_shared,
        identical_answers=identical_answers,
    )
    show_summary(console, summary)
    if as_json:
        sys.stdout.write(json.dumps(dataclasses.asdict(summary)) + "\n")
    return summary


def _load(console: Console, crew: list[WorkerProcess]) -> int:
    """Waits for the workers one after the other, so that the first one converts the model for all."""
    console.print(f"loading the model in {len(crew)} workers ...")
    block_bytes = 0
    with progress(console) as shown:
        for worker in crew:
            task = shown.add_task(worker.name, total=1, stage="starting")
            while not (message := worker.read()).get("ready"):
                shown.update(task, stage=message["stage"])
            block_bytes = message["block_bytes"]
            shown.update(task, completed=1, stage="ready")
    return block_bytes


def _serve(console: Console, crew: list[WorkerProcess]) -> list[Served]:
    served = []
    for index, messages in enumerate(conversations()):
        worker = crew[index % len(crew)]
        reply = worker.ask(messages=messages, max_new_tokens=MAX_NEW_TOKENS)
        one = Served(
            worker=worker.name,
            question=messages[-1]["content"],
            answer=reply["answer"],
            prompt_ids=tuple(reply["prompt_ids"]),
            answer_ids=tuple(reply["answer_ids"]),
            reused_tokens=reply["reused_tokens"],
            computed_tokens=reply["computed_tokens"],
            ttft_s=reply["ttft_s"],
        )
        show_served(console, index + 1, one)
        served.append(one)
    return served


def _used_bytes(socket_path: Path) -> int:
    with connect(str(socket_path), client_name="demo") as harbor:
        (pool,) = harbor.stats(POOL).pools
        return pool.used_bytes


def _verify(console: Console, crew: list[WorkerProcess], served: list[Served]) -> int:
    console.print("comparing each answer with that of the model without any cache ...")
    identical = 0
    with progress(console) as shown:
        task = shown.add_task("answers", total=len(served), stage="")
        for one in served:
            identical += _is_identical(crew[0], one)
            shown.advance(task)
    return identical


def _is_identical(worker: WorkerProcess, one: Served) -> bool:
    reply = worker.ask(prompt_ids=one.prompt_ids, answer_ids=one.answer_ids)
    return bool(reply["identical"])
