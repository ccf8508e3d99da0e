"""What a user passes to vLLM, without vLLM."""

import json
import shlex

import pytest

from kvharbor.engines.vllm import SettingInvalid, Settings, engine_args, serve_arguments


def test_arguments_name_both_halves_and_carry_the_settings() -> None:
    """They are what vLLM's LLM takes, and survive JSON."""
    arguments = engine_args("/run/kv.sock", "chat", size="2GiB", block_tokens=32)
    assert arguments["worker_cls"] == "kvharbor.engines.vllm.HarborWorker"
    assert arguments["scheduler_cls"] == "kvharbor.engines.vllm.HarborScheduler"
    assert arguments["block_size"] == 32
    assert arguments["kv_cache_memory_bytes"] == 2**31
    travelled = json.loads(json.dumps(arguments["additional_config"]))
    assert Settings.of(travelled) == Settings("/run/kv.sock", "chat", "2GiB")
    assert Settings.of(travelled).pool_bytes == 2**31


def test_the_command_line_says_the_same() -> None:
    """In the words of `vllm serve`."""
    words = shlex.split(serve_arguments("/run/kv.sock", size="2GiB"))
    options = dict(zip(words[::2], words[1::2], strict=False))
    assert options["--worker-cls"] == "kvharbor.engines.vllm.HarborWorker"
    assert "--enable-prefix-caching" in words
    given = words[words.index("--additional-config") + 1]
    assert Settings.of(json.loads(given)) == Settings("/run/kv.sock", size="2GiB")


@pytest.mark.parametrize(
    ("given", "setting"),
    [
        ({}, "endpoint"),
        ({"kvharbor": "/run/kv.sock"}, "endpoint"),
        ({"kvharbor": {"sise": "2GiB"}}, "sise"),
        ({"kvharbor": {"pool": ""}}, "pool"),
        (None, "endpoint"),
    ],
)
def test_settings_that_are_missing_or_wrong_are_named(given: object, setting: str) -> None:
    """Also one that is misspelt."""
    with pytest.raises(SettingInvalid) as refused:
        Settings.of(given)
    assert refused.value.setting == setting
