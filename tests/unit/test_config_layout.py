"""Pools declared in the settings: what a layout table means, and how mistakes in it are told."""

from pathlib import Path

import pytest

from kvharbor.gpumem import BlockOrder, DataType, Layout, Plane
from kvharbor.server.configuration.sources import load_settings
from kvharbor.server.errors import StartupError

LAYOUT = """
[pools.main.layout]
model = "m@1"
block_tokens = 32
tp_size = 2
scratch_blocks = 2
order = "block_major"
planes = [
    {name = "k", layer_count = 3, data_type = "bfloat16", head_count = 2, head_dim = 8},
    {name = "v", layer_count = 3, data_type = "bfloat16", head_count = 2, head_dim = 8},
    {name = "x", layer_count = 1, data_type = "uint8", interior = "engine-1", page_bytes = 64},
]
"""


def written(tmp_path: Path, head: str, layout: str = LAYOUT) -> Path:
    """Returns a settings file with a pool "main"."""
    path = tmp_path / "kvharbor.toml"
    path.write_text(f"[pools.main]\n{head}\n{layout}")
    return path


def test_a_layout_table_is_the_layout_that_engines_name(tmp_path: Path) -> None:
    """Equal to what OpenPool builds, plane by plane."""
    rules = load_settings({}, {}, written(tmp_path, 'size = "1MiB"\ntenant = "blue"')).settings.pools["main"]
    assert rules.tenant == "blue"
    assert rules.layout is not None
    planes = (
        *(Plane.of_tokens(name, 3, 2, 8, DataType.BFLOAT16, 32) for name in ("k", "v")),
        Plane("x", 1, DataType.UINT8, 64, "engine-1"),
    )
    assert rules.layout.layout() == Layout("m@1", 32, planes, BlockOrder.BLOCK_MAJOR, tp_size=2, scratch_blocks=2)


def test_what_a_layout_table_leaves_out_is_as_in_the_library(tmp_path: Path) -> None:
    """One default, wherever it is left out."""
    plane = '{name = "k", layer_count = 1, data_type = "float32", head_count = 1, head_dim = 16}'
    layout = f'[pools.main.layout]\nmodel = "m"\nplanes = [{plane}]\n'
    rules = load_settings({}, {}, written(tmp_path, 'size = "1MiB"', layout)).settings.pools["main"]
    assert rules.layout is not None
    planes = (Plane.of_tokens("k", 1, 1, 16, DataType.FLOAT32, 64),)
    assert rules.layout.layout() == Layout("m", 64, planes)


@pytest.mark.parametrize(
    ("head", "layout", "message"),
    [
        ("", LAYOUT, r"setting pools\.main \(file\): a pool with a layout is made at the start: give its size"),
        ('tenant = "a"', "", r"setting pools\.main \(file\): tenant is for a pool that is made at the start"),
        ('size = "1KiB"', LAYOUT, r"setting pools\.main \(file\): 1024 bytes \(.* hold less than one block .*at least"),
        ('size = "1MiB"', LAYOUT.replace("= 32", "= 33"), r"pools\.main \(file\): block_tokens is 33, must be"),
        ('size = "1MiB"', LAYOUT.replace("model", "modle"), r"pools\.main\.layout\.model \(file\): Field required"),
        (
            'size = "1MiB"',
            LAYOUT.replace("tp_size", "tpsize"),
            "pools.main.layout has the unknown setting 'tpsize'; did you mean 'tp_size'",
        ),
        (
            'size = "1MiB"',
            LAYOUT.replace("head_count", "heads"),
            "pools.main.layout.planes has the unknown setting 'heads'; did you mean 'head_",
        ),
        (
            'size = "1MiB"',
            LAYOUT.replace("bfloat16", "bf16"),
            r"planes\.0\.data_type \(file\): 'bf16': Input should be",
        ),
        ('size = "1MiB"', LAYOUT.replace("block_major", "rows"), "'layer_major' or 'block_major'"),
        ('size = "1MiB"', LAYOUT.replace('"v"', '"k"'), "distinct names: rename the repeated plane"),
        ('size = "1MiB"\ntenant = ""', LAYOUT, r"pools\.main\.tenant \(file\): '': String should have at least 1"),
    ],
)
def test_a_mistake_is_told_with_its_place(tmp_path: Path, head: str, layout: str, message: str) -> None:
    """One line, before anything is made."""
    with pytest.raises(StartupError, match=message) as refused:
        load_settings({}, {}, written(tmp_path, head, layout))
    assert "\n" not in str(refused.value)


def test_declared_pools_have_to_fit_together(tmp_path: Path) -> None:
    """Each fits, with both its parts; the two of them do not."""
    text = 'size = "300KiB"\n' + LAYOUT + '[pools.b]\nsize = "300KiB"\n' + LAYOUT.replace("main", "b")
    loaded = load_settings({"memory": "1MiB"}, {}, written(tmp_path, text, ""))
    loaded.require_pools_fit(2**21)
    with pytest.raises(
        StartupError, match=r"setting pools \(file\): the 2 pools with a layout need 1.2 MiB, more than"
    ):
        loaded.require_pools_fit(2**20)


def test_each_part_of_a_declared_pool_has_the_size(tmp_path: Path) -> None:
    """A pool of two ranks needs twice what one of them does."""
    loaded = load_settings({"memory": "1MiB"}, {}, written(tmp_path, 'size = "600KiB"'))
    loaded.require_pools_fit(1200 * 1024)
    with pytest.raises(StartupError, match="600KiB for each of 2 parts is more than memory"):
        loaded.require_pools_fit(1200 * 1024 - 1)
