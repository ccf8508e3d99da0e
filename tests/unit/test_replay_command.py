"""`kvharbor replay` and `generate-trace`: what they print."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner, Result

from kvharbor.server.cli import app
from kvharbor.server.errors import CommandError
from kvharbor.server.replay.curves import Curve, Frame, frame_of, ratio_at


def run(*arguments: object) -> Result:
    """Runs a command in this process."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "100"})


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace that is made up."""
    made = tmp_path_factory.mktemp("traces") / "made.jsonl.gz"
    assert run("generate-trace", made, "--conversations", 5, "--seed", 3).exit_code == 0
    return made


def test_json_is_a_list_with_the_agreed_keys(file: Path) -> None:
    """One object for each capacity and policy."""
    done = run("replay", file, "--blocks", "100%", "--blocks", "500", "--mode", "concurrent", "--json")
    outcomes = json.loads(done.stdout)
    assert [set(one) for one in outcomes] == [
        {"trace", "policy", "blocks", "mode", "asked_blocks", "hit_blocks", "evictions"}
    ] * len(outcomes)
    assert {(one["trace"], one["mode"]) for one in outcomes} == {("made.jsonl.gz", "concurrent")}
    assert {one["policy"] for one in outcomes} >= {"lru", "min"}
    assert len({one["blocks"] for one in outcomes}) == 2
    assert len({one["asked_blocks"] for one in outcomes}) == 1


def test_people_get_a_table_and_a_picture(file: Path, tmp_path: Path) -> None:
    """With a row a policy, a line a policy, and a legend; the same picture as a file."""
    picture = tmp_path / "picture.svg"
    done = run(
        "replay", file, "--blocks", "50%", "--blocks", "100%", "--policy", "lru", "--policy", "min", "--svg", picture
    )
    assert done.exit_code == 0
    assert [line for line in done.stdout.splitlines() if "━━ offline optimum" in line and "━━ lru" in line]
    assert sum(line.count("│ lru ") for line in done.stdout.splitlines()) == 2
    root = ElementTree.parse(picture).getroot()
    assert len(root.findall("{http://www.w3.org/2000/svg}polyline")) == 2


def test_one_capacity_makes_no_picture(file: Path, tmp_path: Path) -> None:
    """A point is no curve."""
    done = run("replay", file, "--blocks", "50%")
    assert (done.exit_code, "━━" in done.stdout.split("└")[-1]) == (0, False)
    failed = run("replay", file, "--blocks", "50%", "--svg", tmp_path / "none.svg")
    assert isinstance(failed.exception, CommandError)
    assert not (tmp_path / "none.svg").exists()


def test_too_small_a_memory_is_told(file: Path) -> None:
    """A ratio means little where requests were left out."""
    done = run("replay", file, "--blocks", "1", "--policy", "lru", "--json")
    assert "requests are larger than 1 blocks and were left out" in done.stderr
    assert json.loads(done.stdout)[0]["hit_blocks"] == 0


def test_an_unknown_policy_names_those_that_are_known(file: Path) -> None:
    """Before the trace is read."""
    failed = run("replay", file, "--policy", "random")
    assert str(failed.exception).startswith("no policy is named 'random': choose from ")


def test_a_trace_without_a_whole_block_is_no_use(file: Path) -> None:
    """It says what to change."""
    failed = run("replay", file, "--block-tokens", 64 * 1024)
    assert "ask for smaller ones" in str(failed.exception)


def test_a_curve_is_straight_between_its_points() -> None:
    """On the logarithmic axis: ten is half-way from one to a hundred."""
    curve = Curve("lru", ((1, 0.0), (100, 0.5)))
    frame = frame_of([curve])
    assert frame == Frame(1, 100, 0.5)
    assert ratio_at(curve, frame, frame.across(10)) == pytest.approx(0.25)
    assert (ratio_at(curve, frame, 0.0), ratio_at(curve, frame, 1.0)) == (0.0, 0.5)
