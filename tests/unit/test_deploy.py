"""What is shipped for operators works as it stands."""

import tomllib
from pathlib import Path

from kvharbor.server.settings import Settings

DEPLOY = Path(__file__).parents[2] / "deploy"


def test_the_example_settings_are_valid() -> None:
    """An operator can start from the example file."""
    settings = Settings(**tomllib.loads((DEPLOY / "kvharbor.toml").read_text()))
    assert settings.pool_rules("main").size == 2 * 2**30
    assert settings.socket_mode == 0o660
