"""`kvharbor replay` and `generate-trace`: what they print."""

import json
import re
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


def test_lines_are_told_apart_without_colours(file: Path, tmp_path: Path) -> None:
    """By letters on a terminal, by dashes in the file; what stderr tells meanwhile has a line a setting."""
    picture = tmp_path / "picture.svg"
    done = run("replay", file, "--blocks", "10%", "--blocks", "100%", "--svg", picture)
    drawn, legend = done.stdout.split("hit rate over capacity")[1].split("└")
    names = dict(re.findall(r"([A-Z]) ━━ (\S+)", legend))
    assert sorted(names.values()) == ["auto", "lru", "offline"]
    assert set(re.findall("[A-Z]", drawn)) == set(names)
    lines = ElementTree.parse(picture).getroot().findall("{http://www.w3.org/2000/svg}polyline")
    assert len({line.get("stroke-dasharray") for line in lines}) == len(lines) == 3
    assert [line.split(":")[0] for line in done.stderr.splitlines()[:6]] == [f"{at} of 6" for at in range(1, 7)]


def test_no_figure_of_the_table_is_cut(file: Path) -> None:
    """In the eighty columns of a file or a small terminal."""
    done = CliRunner().invoke(app, ["replay", str(file), "--blocks", "10%"], env={"COLUMNS": "80"})
    assert "…" not in done.stdout
    assert re.search(r"│ +10\.\d% │", done.stdout)


def test_a_generated_trace_overwrites_nothing_unasked(tmp_path: Path) -> None:
    """And what was written is told, apart from what may be the file."""
    path = tmp_path / "a.jsonl"
    path.write_text("mine")
    refused = run("generate-trace", path, "--conversations", 2)
    assert (str(refused.exception), path.read_text()) == (
        f"{path} is there already: name another file, or overwrite it with --force",
        "mine",
    )
    done = run("generate-trace", path, "--conversations", 2, "--force")
    assert (done.exit_code, done.stdout) == (0, "")
    written = len(path.read_text().splitlines()) - 1
    assert done.stderr == f"{path}: {written} requests of 2 conversations, in blocks of 64\n"


def test_one_capacity_makes_no_picture(file: Path, tmp_path: Path) -> None:
    """A point is no curve."""
    done = run("replay", file, "--blocks", "50%")
    assert (done.exit_code, "━━" in done.stdout.split("└")[-1]) == (0, False)
    failed = run("replay", file, "--blocks", "50%", "--svg", tmp_path / "none.svg")
    assert isinstance(failed.exception, CommandError)
    assert failed.stderr == ""  # refused before anything is replayed
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
