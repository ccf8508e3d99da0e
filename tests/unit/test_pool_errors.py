"""Every refusal of the pool: one reason, one entry in the API, all its values as metadata."""

import re
from pathlib import Path
from string import Formatter

import pytest

from kvharbor.pool import errors
from kvharbor.pool.errors import PoolError

PROTO = Path(__file__).parents[2] / "proto" / "kvharbor" / "v1" / "errors.proto"
CLASSES = sorted(PoolError.__subclasses__(), key=lambda kind: kind.__name__)


def documented_keys() -> dict[str, set[str]]:
    """Reads the metadata keys from the comment of each reason."""
    keys: dict[str, set[str]] = {}
    comment = ""
    for line in PROTO.read_text(encoding="utf-8").splitlines():
        line = line.strip()
        if line.startswith("//"):
            comment += line.removeprefix("//")
        elif found := re.match(r"ERROR_REASON_(\w+) = \d+;", line):
            listed = re.search(r"Metadata: ([\w, ]+)\.", comment)
            keys[found[1]] = set(re.findall(r"\w+", listed[1])) if listed else set()
            comment = ""
        else:
            comment = ""
    return keys


def placeholders(kind: type[PoolError]) -> set[str]:
    return {name for _, name, _, _ in Formatter().parse(kind.template) if name}


def camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.title() for word in rest)


@pytest.mark.parametrize("kind", CLASSES)
def test_the_metadata_keys_are_those_of_the_api(kind: type[PoolError]) -> None:
    """A reason's comment in errors.proto names exactly the values that its message shows."""
    assert {camel(name) for name in placeholders(kind)} == documented_keys()[kind.reason]


@pytest.mark.parametrize("kind", CLASSES)
def test_every_value_of_the_message_is_in_the_metadata(kind: type[PoolError]) -> None:
    """Message and metadata are made of the same attributes, so neither can say what the other does not."""
    refused = kind(**{name: f"<{name}>" for name in placeholders(kind)})
    assert all(value in str(refused) for value in refused.metadata().values())
    assert refused.metadata().keys() == {camel(name) for name in placeholders(kind)}


def test_no_two_refusals_share_a_reason() -> None:
    """A client finds the class by the reason."""
    reasons = [kind.reason for kind in CLASSES]
    assert sorted(set(reasons)) == sorted(reasons)


def test_the_tree_at_the_top_of_the_file_is_complete() -> None:
    """Each class is drawn once in the docstring's tree."""
    assert {kind.__name__ for kind in CLASSES} == set(re.findall(r"[A-Z]\w+", errors.__doc__ or "")) & {
        name for name, value in vars(errors).items() if isinstance(value, type) and value is not PoolError
    }
