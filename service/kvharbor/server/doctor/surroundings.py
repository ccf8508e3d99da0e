"""What the checks are about: files, environment, settings, and the arena that is wanted."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvharbor.gpumem.arena import ArenaKind
from kvharbor.server.configuration.settings import Settings
from kvharbor.server.doctor.place import Place


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Handed to every topic. `root` is where proc, sys and dev are found.

    `settings_failure` tells why the settings are the defaults and not the operator's. `socket` was named on the command
    line, so that somebody is expected to serve there; `attach`: be a worker of that service for a moment.
    """

    root: Path
    environment: Mapping[str, str]
    place: Place
    settings: Settings
    settings_failure: str
    arena: ArenaKind
    socket: str | None
    attach: bool

    @property
    def does_without_devices(self) -> bool:
        """Whether nobody wants devices here: the arena is the host's, and there is no driver.

        Under WSL there is no kernel module, but a device by which the driver is reached.
        """
        has_driver = any((self.root / file).exists() for file in ("proc/driver/nvidia/version", "dev/dxg"))
        return self.arena is ArenaKind.HOST and not has_driver
