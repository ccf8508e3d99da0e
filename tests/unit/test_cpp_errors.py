"""The C++ client's error tree is the Python client's, as its header declares it."""

import re
from pathlib import Path

from kvharbor.client import errors
from kvharbor.client.errors import HarborError
from kvharbor.v1 import errors_pb2

SOURCES = Path(__file__).parents[2] / "clients" / "cpp"
HEADER = (SOURCES / "include" / "kvharbor" / "errors.hpp").read_text()
REFUSALS = (SOURCES / "src" / "refusals.cpp").read_text()
LEAVES = {
    name: (group, reason)
    for name, group, reason in re.findall(r'^KVHARBOR_ERROR\((\w+),\s+(\w+),\s+"(\w+)"\);', HEADER, re.MULTILINE)
}
GROUPS = dict(re.findall(r"^class (\w+) : public (\w+) \{", HEADER, re.MULTILINE))
# What maps memory is this library itself, and in Python another package with a tree of its own.
OF_MEMORY = {"ArenaUnfit", "BuiltWithoutCuda", "DeviceFailed"}
# Pools are listed by the Python client alone, which finds this out itself.
OF_LISTS = {"PoolAmbiguous"}
# Where Python has an attribute.
UNANSWERED = "Unanswered"


def python_leaves() -> dict[str, tuple[str, str]]:
    """Returns group and reason of each leaf of the Python client's tree, by its name."""
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, HarborError)]
    leaves = {kind.__name__: (kind.__bases__[0].__name__, kind.reason) for kind in kinds if kind.reason}
    return {name: leaf for name, leaf in leaves.items() if name not in OF_LISTS}


def test_every_error_of_the_python_client_has_its_class() -> None:
    """With the same name, reason and group, and the other way round."""
    grouped = {
        name: (GROUPS[group] if group == UNANSWERED else group, reason) for name, (group, reason) in LEAVES.items()
    }
    assert {name: leaf for name, leaf in grouped.items() if name not in OF_MEMORY} == python_leaves()


def test_every_reason_of_the_service_becomes_a_class() -> None:
    """None of them is left to its status code."""
    reasons = {name.removeprefix("ERROR_REASON_") for name in errors_pb2.ErrorReason.DESCRIPTOR.values_by_name} - {
        "UNSPECIFIED"
    }
    assert reasons - {reason for _, reason in LEAVES.values()} == set()


def test_every_class_is_made_from_its_reason() -> None:
    """The table of refusals names each leaf once."""
    assert sorted(re.findall(r"entry<(\w+)>\(\)", REFUSALS)) == sorted(LEAVES)


def test_lost_answers_are_those_of_the_python_client() -> None:
    """`outcome_unknown` is said of the same leaves."""
    unknown = {name for name, (group, _) in LEAVES.items() if group in (UNANSWERED, "ServiceBug")}
    assert unknown == {name for name in python_leaves() if getattr(errors, name).outcome_unknown}
