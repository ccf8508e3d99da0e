"""What users set wrong for an engine: refused by name where it is written, not minutes later."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from kvharbor.engines import vllm, vllm_connector
from kvharbor.engines.sglang_linker import LinkerSettings, server_arguments
from kvharbor.engines.sglang_linker.errors import LinkerSettingInvalid
from kvharbor.engines.vllm import SettingInvalid, Settings, VersionUnsupported, engine_args, versions
from kvharbor.engines.vllm_connector import connector_args

WRONG = [
    ("endpoint", 5),
    ("pool", ""),
    ("pool", 5),
    ("model", 5),
    ("size", "8 potatoes"),
    ("size", "8"),
    ("size", "0.1B"),
    ("size", -1),
    ("size", True),
    ("instance", 5),
    ("instance", "two\nlines"),
    ("instance", "x" * 129),
    ("timeout_s", "10"),
    ("timeout_s", 0),
    ("timeout_s", -1.0),
    ("timeout_s", float("nan")),
]


@pytest.mark.parametrize(("setting", "value"), [*WRONG, ("allow_untested_version", "no")])
def test_a_wrong_setting_of_vllm_is_named(setting: str, value: object) -> None:
    """With its value and what it must be."""
    with pytest.raises(SettingInvalid, match="must be") as refused:
        Settings.of({"kvharbor": {setting: value}})
    assert (refused.value.setting, repr(value) in str(refused.value)) == (setting, True)


@pytest.mark.parametrize(("setting", "value"), [*WRONG, ("model", ""), ("sise", "1GiB")])
def test_a_wrong_setting_of_sglang_is_named(setting: str, value: object) -> None:
    """As SGLang hands it over, and where the options are made."""
    with pytest.raises(LinkerSettingInvalid, match="must be") as refused:
        LinkerSettings.of({"model": "m", setting: value})
    assert (refused.value.setting, repr(value) in str(refused.value)) == (setting, True)
    assert LinkerSettings.of({"model": "m"}) == LinkerSettings("m")


def test_settings_without_a_model_are_refused_for_sglang() -> None:
    """Nobody can name the weights but the user."""
    with pytest.raises(LinkerSettingInvalid, match="model"):
        LinkerSettings.of(None)
    with pytest.raises(LinkerSettingInvalid, match="model"):
        server_arguments(LinkerSettings(""))


@pytest.mark.parametrize("made", [engine_args, connector_args])
def test_arguments_are_checked_as_they_are_made(made: Callable[..., Any]) -> None:
    """Before they go to vLLM."""
    with pytest.raises(SettingInvalid, match="size"):
        made("/run/kv.sock", size="8 potatoes")


@pytest.mark.parametrize(
    ("package", "module", "name"),
    [
        (vllm, "kvharbor.engines.vllm.worker", "HarborWorker"),
        (vllm, "kvharbor.engines.vllm.scheduler", "HarborScheduler"),
        (vllm_connector, "kvharbor.engines.vllm_connector.connector", "HarborConnector"),
    ],
)
def test_a_vllm_without_the_names_that_are_relied_on_is_refused_as_a_version(
    package: Any, module: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The import fails before any version could be compared; where the version is one of ours it is what it is."""
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(versions, "vllm_version", lambda: "0.31.2")
    with pytest.raises(VersionUnsupported, match=r"0\.31\.2"):
        getattr(package, name)
    for version in ("0.32.0", versions.UNKNOWN):
        monkeypatch.setattr(versions, "vllm_version", lambda version=version: version)
        with pytest.raises(ImportError):
            getattr(package, name)


def test_nothing_of_vllm_is_imported_with_the_settings() -> None:
    """Whoever only makes arguments needs no vLLM in his environment."""
    code = "import sys; from kvharbor.engines import vllm, vllm_connector, sglang_linker; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
