"""Docs that name everything that there is, and links that lead somewhere."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvharbor.server.configuration.settings import Settings
from kvharbor.v1 import errors_pb2

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    page
    for page in [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("*/README.md"),
        *ROOT.glob("*/*/README.md"),
        *ROOT.glob("clients/python/kvharbor/*/README.md"),
    ]
    if ".venv" not in page.parts and "build" not in page.parts
)


def test_every_error_reason_is_documented() -> None:
    """A caller finds what to do for each reason that the service can give."""
    text = (ROOT / "docs" / "protocol.md").read_text()
    reasons = [name.removeprefix("ERROR_REASON_") for name in errors_pb2.ErrorReason.keys()]  # noqa: SIM118
    missing = [reason for reason in reasons if reason != "UNSPECIFIED" and f"| {reason} |" not in text]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_that_exist(page: Path) -> None:
    """A link inside the project is to a file of the project."""
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
    broken = [target for target in targets if "://" not in target and not (page.parent / target).exists()]
    assert broken == []


def test_rules_cited_in_code_are_written_down() -> None:
    """A mark such as [P5] in code or tests names a rule of the docs."""
    documented = set(re.findall(r"\b[A-Z]\d+\b", "".join(page.read_text() for page in PAGES)))
    cited = set()
    for source in [*ROOT.glob("gpumem/**/*.py"), *ROOT.glob("service/**/*.py"), *ROOT.glob("clients/**/*.py")]:
        cited |= set(re.findall(r"\[([A-Z]\d+)\]", source.read_text()))
    assert cited - documented == set()


def test_every_decision_is_listed() -> None:
    """The list of decisions is complete."""
    listed = (ROOT / "docs" / "decisions" / "README.md").read_text()
    files = [page.name for page in (ROOT / "docs" / "decisions").glob("0*.md")]
    assert [name for name in files if f"({name})" not in listed] == []


def test_every_setting_is_documented() -> None:
    """An operator finds each setting, with its default, on one page."""
    text = (ROOT / "docs" / "operations.md").read_text()
    missing = [name for name in Settings.model_fields if f"| `{name}` |" not in text]
    assert missing == []


def test_the_example_of_gpumem_runs() -> None:
    """A reader can paste it."""
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "gpumem" / "README.md").read_text(), re.DOTALL)
    subprocess.run([sys.executable, "-W", "error", "-c", example], check=True, timeout=60)
