"""Where settings come from: flags win over the environment, that over the file, that over the defaults.

The environment has them as KVHARBOR_NAME, tables and lists as JSON; the file is TOML. A key that no setting
has is refused, with the nearest one named if any is near, wherever it stands.
"""

import difflib
import json
import re
import tomllib
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from kvharbor.server.configuration.layout_settings import LayoutSettings, PlaneSettings
from kvharbor.server.configuration.settings import PoolSettings, Settings
from kvharbor.server.errors import StartupError
from kvharbor.server.sizes import format_size

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

PREFIX = "KVHARBOR_"
# What `kvharbor exec` tells its command, and the file itself: no settings, but ours.
_OTHER_VARIABLES = frozenset({"KVHARBOR_CONFIG", "KVHARBOR_SESSION_TOKEN", "KVHARBOR_POOL_ID", "KVHARBOR_DESCRIPTOR"})
# Kubernetes sets these in every container beside a Service called "kvharbor".
_SERVICE_LINK = re.compile(r"KVHARBOR(_SERVICE_(HOST|PORT(_\w+)?)|_PORT(_\w+)?)")
# What a setting of such a type is in the environment.
_JSON_KINDS: Mapping[object, str] = {dict: "an object", frozenset: "a list"}
_NEAR = 0.5
"""Least likeness, of 1, at which a name may be what was meant."""


@dataclass(frozen=True, slots=True)
class LoadedSettings:
    """The settings, and for each its winning source: "flag", "environment", "file" or "default".

    `written` has those that were set, as they stand in their source.
    """

    settings: Settings
    origins: Mapping[str, str]
    written: Mapping[str, Any]

    def set_by_operator(self) -> dict[str, str]:
        """Returns the settings that were set, for people: "2GiB (flag)"; tables and lists are JSON."""
        return {name: f"{_text(value)} ({self.origins[name]})" for name, value in self.written.items()}

    def require_pools_fit(self, memory_bytes: int) -> None:
        """Raises StartupError if a pool, or all that are made at the start, need more than `memory_bytes`.

        That is what the setting `memory` comes to: a share of what there is, or an amount on each of several devices.
        """
        memory = self.written.get("memory", str(self.settings.memory))
        if self.settings.memory != memory_bytes:
            memory += f", here {format_size(memory_bytes)}"
        for name, rules in self.settings.pools.items():
            if rules.size is not None and rules.size * rules.part_count > memory_bytes:
                size = self.written["pools"][name]["size"]
                if rules.part_count > 1:
                    size += f" for each of {rules.part_count} parts"
                raise StartupError(
                    f"setting pools.{name}.size ({self.origins['pools']}): {size} is more than memory ({memory}): "
                    f"set less, or raise memory"
                )
        declared = [rules for rules in self.settings.pools.values() if rules.layout is not None]
        sum_bytes = sum((rules.size or 0) * rules.part_count for rules in declared)
        if sum_bytes > memory_bytes:
            raise StartupError(
                f"setting pools ({self.origins['pools']}): the {len(declared)} pools with a layout need "
                f"{format_size(sum_bytes)}, more than memory ({memory}): set less, or raise memory"
            )


def load_settings(flags: Mapping[str, object], environment: Mapping[str, str], file: Path | None) -> LoadedSettings:
    """Reads and validates every setting. `flags` holds those given; None stands for not given.

    `file` wins over the variable KVHARBOR_CONFIG; without either no file is read. Raises StartupError for
    the first thing wrong, with setting, source, value and remedy.
    """
    if file is None and environment.get("KVHARBOR_CONFIG"):
        file = Path(environment["KVHARBOR_CONFIG"])
    values: dict[str, object] = {}
    origins = dict.fromkeys(Settings.model_fields, "default")
    by_source = {
        "file": {} if file is None else _from_file(file),
        "environment": _from_environment(environment),
        "flag": {name: value for name, value in flags.items() if value is not None},
    }
    for source, found in by_source.items():
        values.update(found)
        origins.update(dict.fromkeys(found, source))
    try:
        settings = Settings.model_validate(values)
    except ValidationError as failure:
        raise StartupError(_explained(failure, origins)) from None
    return LoadedSettings(settings, origins, values)


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _from_file(file: Path) -> dict[str, object]:
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as failure:
        raise StartupError(f"cannot read the settings file {file}: {failure.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as failure:
        raise StartupError(f"the settings file {file} is no TOML: {failure}") from None
    for name in values:
        if name not in Settings.model_fields:
            raise StartupError(f"the settings file {file} has the {_unknown(name, Settings.model_fields)}")
    return values


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """Returns what there is to say of each variable under our prefix that is none of ours."""
    known = [PREFIX + field.upper() for field in Settings.model_fields]
    return [_unknown(variable, known) for variable in _variables(environment) if variable not in known]


def _variables(environment: Mapping[str, str]) -> list[str]:
    ours = [name for name in environment if name.startswith(PREFIX) and name not in _OTHER_VARIABLES]
    return [name for name in ours if not _SERVICE_LINK.fullmatch(name)]


def _from_environment(environment: Mapping[str, str]) -> dict[str, object]:
    if unknown := unknown_variables(environment):
        raise StartupError(f"the environment has the {unknown[0]}")
    values: dict[str, object] = {}
    for variable in _variables(environment):
        name, text = variable.removeprefix(PREFIX).lower(), environment[variable]
        kind = _JSON_KINDS.get(typing.get_origin(Settings.model_fields[name].annotation))
        values[name] = text if kind is None else _from_json(variable, text, kind)
    return values


def _from_json(variable: str, text: str, kind: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as failure:
        raise StartupError(f"{variable} is {text[:80]!r}, must be {kind} in JSON: {failure}") from None


def _explained(failure: ValidationError, origins: Mapping[str, str]) -> str:
    error = failure.errors(include_url=False)[0]
    name = str(error["loc"][0])
    place = ".".join(str(part) for part in error["loc"] if part != "[key]")
    if error["type"] == "extra_forbidden":
        table = [part for part in error["loc"][:-1] if isinstance(part, str)]
        return f"{'.'.join(table)} has the {_unknown(str(error['loc'][-1]), _fields_of(table))}"
    shown = "" if error["type"] in ("value_error", "missing") else f"{str(error['input'])[:80]!r}: "
    return f"setting {place} ({origins.get(name, 'default')}): {shown}{_why(error, place)}"


def _why(error: "ErrorDetails", place: str) -> str:
    """Returns what is wrong with a value, where pydantic's own words name a type of Python in the operator's."""
    if error["type"] in ("dict_type", "model_type"):
        return f"write a table [{place}{'.NAME' if place == 'pools' else ''}]"
    if error["type"] == "float_parsing" and place.endswith("_s"):
        return "write seconds, e.g. 5"
    return error["msg"].removeprefix("Value error, ")


def _fields_of(table: list[str]) -> Iterable[str]:
    """Returns the keys of a table in the file, named by the keys that lead there: pools, NAME, layout, planes."""
    models: tuple[type[BaseModel], ...] = (Settings, PoolSettings, LayoutSettings, PlaneSettings)
    return models[max(len(table) - 1, 0)].model_fields


def _unknown(name: str, known: Iterable[str]) -> str:
    # The prefix of variables is in all of them, and no likeness.
    by_likeness = {each.removeprefix(PREFIX): each for each in known}
    near = difflib.get_close_matches(name.removeprefix(PREFIX), by_likeness, n=1, cutoff=_NEAR)
    told = f"did you mean {by_likeness[near[0]]!r}?" if near else "docs/operations.md has those that there are"
    return f"unknown setting {name!r}; {told}"
