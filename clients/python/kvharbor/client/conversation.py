"""A link's stream of calls, as far as the death of the service's process concerns it."""

from typing import Protocol

from kvharbor.client.errors import HarborError


class Conversation(Protocol):
    """A link's stream of calls. Each method is called by `atomically`."""

    def replaced(self) -> None:
        """The next process is to be told how things stand."""

    def returned(self) -> None:
        """The next process knows all."""

    def void(self, cause: HarborError) -> None:
        """The epoch has ended."""


class Silence:
    """The stream of a client that has none."""

    def replaced(self) -> None:
        """Has nothing to send again."""

    def returned(self) -> None:
        """Has nothing to go on with."""

    def void(self, cause: HarborError) -> None:
        """Has nothing that could end."""
