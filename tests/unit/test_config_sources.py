"""Settings: where values come from, which source wins, and what is refused."""

import inspect
import re
from pathlib import Path
from typing import get_args

import pytest

from kvharbor.pool import POLICIES
from kvharbor.server.commands.serve import serve
from kvharbor.server.configuration.settings import EvictionPolicy, Settings
from kvharbor.server.configuration.sources import load_settings, unknown_variables
from kvharbor.server.errors import StartupError


def written(tmp_path: Path, text: str) -> Path:
    """Returns a settings file with that text."""
    path = tmp_path / "kvharbor.toml"
    path.write_text(text)
    return path


def test_flags_win_over_the_environment_that_over_the_file_that_over_defaults(tmp_path: Path) -> None:
    """The stated precedence, and the winner of each setting is known."""
    file = written(tmp_path, 'memory = "3GiB"\ngrace_s = 3\nhandoff_ttl_s = 3\n')
    environment = {"KVHARBOR_MEMORY": "2GiB", "KVHARBOR_GRACE_S": "2"}
    loaded = load_settings({"memory": "1GiB", "grace_s": None}, environment, file)
    settings = loaded.settings
    assert (settings.memory, settings.grace_s, settings.handoff_ttl_s, settings.max_sessions) == (2**30, 2, 3, 1024)
    assert [loaded.origins[name] for name in ("memory", "grace_s", "handoff_ttl_s", "max_sessions")] == [
        "flag",
        "environment",
        "file",
        "default",
    ]


def test_the_file_can_be_named_in_the_environment(tmp_path: Path) -> None:
    """KVHARBOR_CONFIG is read where no file is given."""
    file = written(tmp_path, 'log_level = "debug"\n')
    assert load_settings({}, {"KVHARBOR_CONFIG": str(file)}, None).settings.log_level == "debug"


def test_an_unknown_key_in_the_file_is_refused_with_the_nearest_one(tmp_path: Path) -> None:
    """A misspelt key must not start a service with a default in its place."""
    with pytest.raises(StartupError, match="'max_sesions'; did you mean 'max_sessions'"):
        load_settings({}, {}, written(tmp_path, "max_sesions = 3\n"))


def test_an_unknown_key_in_the_environment_is_refused_with_the_nearest_one() -> None:
    """Everything under our prefix has to be known."""
    with pytest.raises(StartupError, match="'KVHARBOR_MEMROY'; did you mean 'KVHARBOR_MEMORY'"):
        load_settings({}, {"KVHARBOR_MEMROY": "1GiB"}, None)


def test_an_unknown_key_in_a_table_is_refused_with_the_nearest_one(tmp_path: Path) -> None:
    """Tables of pools are as strict as the settings around them."""
    with pytest.raises(StartupError, match=r"pools\.main has the unknown setting 'siz'; did you mean 'size'"):
        load_settings({}, {}, written(tmp_path, '[pools.main]\nsiz = "1GiB"\n'))


@pytest.mark.parametrize(
    ("text", "variables", "name"),
    [
        ("[kvharbor]\nmemory = '1GiB'", {}, "kvharbor"),
        ("[pools.main]\nquota = 3", {}, "quota"),
        ("", {"KVHARBOR_XYZQ": "1"}, "KVHARBOR_XYZQ"),
    ],
)
def test_where_no_key_is_near_none_is_named(tmp_path: Path, text: str, variables: dict[str, str], name: str) -> None:
    """It would send the operator astray; the prefix of variables is no likeness."""
    with pytest.raises(StartupError) as refused:
        load_settings({}, variables, written(tmp_path, text))
    assert str(refused.value).endswith(f"unknown setting {name!r}; docs/operations.md has those that there are")


def test_variables_that_are_ours_but_no_settings_are_let_pass() -> None:
    """What `kvharbor exec` gives its command, and what Kubernetes sets beside a Service called kvharbor."""
    environment = {
        "KVHARBOR_SESSION_TOKEN": "t",
        "KVHARBOR_POOL_ID": "p",
        "KVHARBOR_DESCRIPTOR": "{}",
        "KVHARBOR_SERVICE_HOST": "10.0.0.1",
        "KVHARBOR_SERVICE_PORT_GRPC": "50051",
        "KVHARBOR_PORT_50051_TCP_ADDR": "10.0.0.1",
    }
    assert load_settings({}, environment, None).settings == Settings()
    told = "unknown setting 'KVHARBOR_SOKET'; did you mean 'KVHARBOR_SOCKET'?"
    assert unknown_variables({**environment, "KVHARBOR_SOKET": "x", "SOKET": "x"}) == [told]


def test_tables_in_the_environment_are_json() -> None:
    """Maps and lists have one spelling there."""
    environment = {"KVHARBOR_TENANTS": '{"1000": "blue"}', "KVHARBOR_ADMIN_UIDS": "[1001]"}
    settings = load_settings({}, environment, None).settings
    assert (settings.tenant_of(1000), settings.tenant_of(1002)) == ("blue", "uid-1002")
    assert [settings.administrates(uid) for uid in (0, 1001, 1002)] == [True, True, False]


def test_rules_of_a_pool_follow_the_settings_where_its_table_is_silent(tmp_path: Path) -> None:
    """[pools.NAME] overrides, key by key."""
    file = written(
        tmp_path,
        'warm_budget_ratio = 0.5\nmin_reuse_tokens = 32\n[pools.a]\nsize = "1MiB"\nwarm_budget_ratio = 0\n'
        'eviction_policy = "lru"\n',
    )
    settings = load_settings({}, {}, file).settings
    rules = settings.pool_rules("a")
    assert (rules.size, rules.warm_budget_ratio, rules.min_reuse_tokens) == (2**20, 0, 32)
    assert rules.eviction_policy == "lru"
    assert (settings.pool_rules("b").warm_budget_ratio, settings.pool_rules("b").eviction_policy) == (0.5, "auto")


def test_the_policies_of_the_settings_are_those_of_the_pool() -> None:
    """Settings are read where the pool is not imported, so they spell them out."""
    assert get_args(EvictionPolicy) == POLICIES


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"memory": "512"}, r"setting memory \(flag\): '512' has no unit"),
        ({"socket_mode": "0999"}, "no file mode"),
        ({"socket_mode": "1777"}, "no file mode"),
        ({"listen": "localhost"}, "write HOST:PORT"),
        (
            {"listen": "localhost:65536"},
            r"setting listen \(flag\): 'localhost:65536' has no port; write one of 0 to 65535",
        ),
        ({"listen": f"localhost:{'9' * 5000}"}, "write one of 0 to 65535"),
        ({"grace_s": "-1"}, "greater than or equal to 0"),
        ({"grace_s": "5s"}, r"setting grace_s \(flag\): '5s': write seconds, e.g. 5$"),
        ({"warm_budget_ratio": "half"}, "valid number"),
        ({"log_level": "loud"}, "'debug', 'info'"),
        ({"max_message_bytes": "10"}, "greater than or equal to 1048576"),
        ({"socket_group": "no-such-group"}, "there is no group"),
        ({"socket": ""}, "at least 1 character"),
    ],
)
def test_a_bad_value_is_refused_with_its_setting_and_source(flags: dict[str, object], message: str) -> None:
    """One line that names what to change."""
    with pytest.raises(StartupError, match=message) as refused:
        load_settings(flags, {}, None)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('admin_uids = "root"', "setting admin_uids (file): 'root' is no list; write one of user ids, e.g. [1000]"),
        ("admin_uids = 1000", "setting admin_uids (file): 1000 is no list; write one of user ids, e.g. [1000]"),
        ("admin_uids = [true]", "setting admin_uids.0 (file): 'True': Input should be a valid integer"),
        ("admin_uids = [-1]", "setting admin_uids.0 (file): '-1': Input should be greater than or equal to 0"),
        ("pools = 3", "setting pools (file): '3': write a table [pools.NAME]"),
        ("tenants = 3", "setting tenants (file): '3': write a table [tenants]"),
        ("[pools]\nmain = 3", "setting pools.main (file): '3': write a table [pools.main]"),
        ("[pools.main]\nlayout = 3", "setting pools.main.layout (file): '3': write a table [pools.main.layout]"),
    ],
)
def test_a_list_or_table_that_is_none_is_told_as_the_file_has_them(tmp_path: Path, text: str, message: str) -> None:
    """And not by the types that Python has for them."""
    with pytest.raises(StartupError) as refused:
        load_settings({}, {}, written(tmp_path, text))
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("variable", "kind"), [("KVHARBOR_ADMIN_UIDS", "a list in JSON"), ("KVHARBOR_TENANTS", "an object in JSON")]
)
def test_a_variable_that_is_no_json_is_told_with_its_value(variable: str, kind: str) -> None:
    """And with what it has to be."""
    with pytest.raises(StartupError, match=f"^{variable} is 'root', must be {kind}: "):
        load_settings({}, {variable: "root"}, None)


def test_words_may_be_in_capitals(tmp_path: Path) -> None:
    """As units of sizes may."""
    file = written(tmp_path, 'log_level = "INFO"\n[pools.main]\neviction_policy = "LRU"\n')
    flags = {"eviction_policy": "Auto", "arena": "HOST", "cuda_runtime": "Driver", "log_format": "JSON"}
    settings = load_settings(flags, {}, file).settings
    words = (settings.log_level, settings.eviction_policy, settings.arena, settings.cuda_runtime, settings.log_format)
    assert words == ("info", "auto", "host", "driver", "json")
    assert settings.pool_rules("main").eviction_policy == "lru"


def test_a_number_without_a_unit_in_the_file_is_refused(tmp_path: Path) -> None:
    """TOML has integers, and a size is none."""
    with pytest.raises(StartupError, match="1000 has no unit"):
        load_settings({}, {}, written(tmp_path, "memory = 1000\n"))


@pytest.mark.parametrize("text", ["memory = [", "\xff\xfe"])
def test_a_file_that_is_no_toml_is_refused(tmp_path: Path, text: str) -> None:
    """With its name, and without a traceback."""
    path = tmp_path / "kvharbor.toml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(StartupError, match="is no TOML"):
        load_settings({}, {}, path)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """A named file has to exist."""
    with pytest.raises(StartupError, match="cannot read the settings file"):
        load_settings({}, {}, tmp_path / "none.toml")


def test_every_setting_has_a_flag_or_is_a_table() -> None:
    """A setting that only exists in the file would be a surprise; tables belong there."""
    flags = set(inspect.signature(serve).parameters) - {"config"}
    assert set(Settings.model_fields) - flags == {"pools", "tenants", "admin_uids"}
    assert flags - set(Settings.model_fields) == set()


def test_the_help_of_every_flag_has_its_default() -> None:
    """Help is written without the settings, so that it comes at once."""
    unset = {
        "socket_group": "that of the process",
        "listen": "none",
        "anonymous_tenant": "none",
        "metrics_listen": "none",
        "arena": "cuda_ipc with devices, else host",
        "devices": "all visible",
    }
    for name, parameter in inspect.signature(serve).parameters.items():
        if name == "config":
            continue
        shown = re.search(r" Default: (.+)\.$", parameter.annotation.__metadata__[0].help)
        assert shown is not None, name
        default = getattr(Settings(), name)
        if name in unset:
            assert (default in (None, ()), shown[1]) == (True, unset[name])
        else:
            assert getattr(Settings.model_validate({name: shown[1]}), name) == default


def test_settings_are_shown_as_they_were_written(tmp_path: Path) -> None:
    """Only those that were set, each with its source; tables and lists are JSON."""
    file = written(tmp_path, 'socket_mode = "0660"\nadmin_uids = [7]\n[pools.main]\nsize = "1MiB"\n')
    loaded = load_settings({"memory": "2GiB", "listen": None}, {"KVHARBOR_TENANTS": '{"1000": "blue"}'}, file)
    assert loaded.set_by_operator() == {
        "socket_mode": "0660 (file)",
        "admin_uids": "[7] (file)",
        "pools": '{"main": {"size": "1MiB"}} (file)',
        "tenants": '{"1000": "blue"} (environment)',
        "memory": "2GiB (flag)",
    }


@pytest.mark.parametrize(
    ("memory", "shown"), [("1GiB", "1GiB"), ("80%", "80%, here 1.0 GiB"), (None, "80%, here 1.0 GiB")]
)
def test_a_pool_that_memory_cannot_hold_is_refused(tmp_path: Path, memory: str | None, shown: str) -> None:
    """It could never be opened; one that takes all of it can."""
    file = written(tmp_path, '[pools.side]\nsize = "1GiB"\n[pools.main]\nsize = "48GiB"\n')
    loaded = load_settings({"memory": memory}, {}, file)
    with pytest.raises(StartupError) as refused:
        loaded.require_pools_fit(2**30)
    told = f"setting pools.main.size (file): 48GiB is more than memory ({shown}): set less, or raise memory"
    assert str(refused.value) == told
    loaded.require_pools_fit(48 * 2**30)


def test_every_setting_says_what_it_means() -> None:
    """The description is what the documentation shows."""
    assert [name for name, field in Settings.model_fields.items() if not field.description] == []


U0, U1 = "GPU-00000000-0000-0000-0000-000000000000", "MIG-00000000-0000-0000-0000-00000000000b"


@pytest.mark.parametrize(
    ("flags", "variables", "text"),
    [
        ({"devices": f"{U0}, {U1}"}, {}, ""),
        ({"devices": f"{U0.lower()},{U1[:4]}{U1[4:].upper()}"}, {}, ""),
        ({}, {"KVHARBOR_DEVICES": f"{U0},{U1}"}, ""),
        ({}, {}, f'devices = ["{U0}", "{U1}"]'),
    ],
)
def test_devices_are_listed_with_commas_or_in_the_file(
    flags: dict[str, object], variables: dict[str, str], text: str, tmp_path: Path
) -> None:
    """By UUID; with them the arena is cuda_ipc, unless another is set."""
    settings = load_settings(flags, variables, written(tmp_path, text)).settings
    assert (settings.devices, settings.arena_kind) == ((U0, U1), "cuda_ipc")
    assert load_settings({**flags, "arena": "cuda_vmm"}, variables, None).settings.arena_kind == "cuda_vmm"
    assert load_settings({}, {}, None).settings.arena_kind == "host"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"devices": "0"}, r"setting devices \(flag\): '0' are no devices; write each once, by its UUID"),
        ({"devices": f"{U0},{U0}"}, "write each once"),
        ({"devices": f"{U0},{U0.lower()}"}, "write each once"),
        ({"devices": ""}, "are no devices"),
        ({"devices": U0, "arena": "host"}, r"setting devices \(flag\): the arena host lies on no device"),
        ({"arena": "cuda"}, r"setting arena \(flag\): 'cuda': Input should be 'host', 'cuda_ipc' or 'cuda_vmm'"),
        ({"cuda_runtime": "torch"}, "'cupy' or 'driver'"),
        ({"device_grace_s": "-1"}, "setting device_grace_s"),
    ],
)
def test_devices_that_are_none_are_told_so(flags: dict[str, object], message: str) -> None:
    """An ordinal means another device to each process."""
    with pytest.raises(StartupError, match=message):
        load_settings(flags, {}, None)
