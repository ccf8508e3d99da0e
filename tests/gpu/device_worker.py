"""Workers whose pool lies on a device: as those of the host's tests, but for how they touch memory.

One writes as an engine does, by kernels that are still to run when the call returns; one by the driver, where there
is no device but the stub.
"""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from gpu.writers import Load, start_kernel, start_thread
from integration.client_worker import BLOCK_TOKENS, LAYOUT, Worker
from kvharbor.client import Sequence as PoolSequence
from kvharbor.gpumem import DeviceMapped, driver
from kvharbor.gpumem.devices import current

BUSY_SIZE = 2048


class DeviceWorker(Worker):
    """A worker that goes on in a new epoch, and says at which addresses."""

    def __init__(self, target: str, pool_name: str, block_count: int) -> None:
        self.epoch_count = self.moved_count = 0
        super().__init__(
            target, pool_name, block_count, on_epoch=lambda *_: self._let_go(), on_moved=lambda _: self._moved()
        )

    @property
    def memory(self) -> Any:
        """The pool's memory, now."""
        return self.pool.memory

    @property
    def device_mapped(self) -> DeviceMapped:
        """The mapping."""
        return cast(DeviceMapped, self.memory.mapping)

    def place(self) -> tuple[int, int, int]:
        """Returns the address of the memory, and how many epochs have ended and have moved it."""
        return self.device_mapped.address, self.epoch_count, self.moved_count

    def device(self) -> tuple[str, int]:
        """Returns the UUID and the ordinal here of where the pool lies."""
        return self.device_mapped.device.uuid, self.device_mapped.device.ordinal

    def free_block_count(self) -> int:
        """Asks the service."""
        return self.pool.stats().free_block_count

    def keep_storing(self) -> None:
        """Keeps the device busy with stores into the scratch block."""
        raise NotImplementedError

    def keep_view(self) -> None:
        """Takes a view of the first layer of K, as an engine does once, and keeps it."""
        raise NotImplementedError

    def seen_in_kept_view(self, block: int) -> float:
        """Returns the first number of a block, through that view."""
        raise NotImplementedError

    def _let_go(self) -> None:
        self.epoch_count += 1

    def _moved(self) -> None:
        self.moved_count += 1


class TorchWorker(DeviceWorker):
    """Writes by kernels of torch's current stream, behind others that take a while; leaves waiting to the client."""

    def write_stamps(self, sequence: PoolSequence, first_token: int, stamps: Sequence[float]) -> None:
        import torch

        blocks, inside = _places(sequence, first_token, first_token + len(stamps))
        device = torch.device("cuda", self.device_mapped.device.ordinal)
        busy = torch.ones(BUSY_SIZE, BUSY_SIZE, device=device)
        values = torch.tensor(stamps, device=device)[:, None, None]
        for _ in range(20):
            busy = busy @ busy / BUSY_SIZE
        values = values + (busy[0, 0] - 1)
        for plane in LAYOUT.planes:
            for layer in range(plane.layer_count):
                tensor = self.pool.views.torch(plane.name, layer)
                tensor[torch.from_numpy(blocks), torch.from_numpy(inside)] = values.expand(-1, *tensor.shape[2:])

    def read(self, name: str, first_token: int, end_token: int) -> list[float]:
        import torch

        blocks, inside = map(torch.from_numpy, _places(self.sequences[name], first_token, end_token))
        pages = [
            self.pool.views.torch(plane.name, layer)[blocks, inside].flatten(1).cpu().numpy()
            for plane in LAYOUT.planes
            for layer in range(plane.layer_count)
        ]
        return _one_a_token(pages)

    def keep_storing(self) -> None:
        start_kernel(self.device_mapped, Load.ONE_THREAD)

    def keep_view(self) -> None:
        self._kept = self.pool.views.torch("k", 0)

    def seen_in_kept_view(self, block: int) -> float:
        return float(self._kept[block, 0, 0, 0])


class DriverWorker(DeviceWorker):
    """Writes by the driver, which is done when the call returns."""

    def write_stamps(self, sequence: PoolSequence, first_token: int, stamps: Sequence[float]) -> None:
        for place, value in zip(self._tokens(sequence, first_token, first_token + len(stamps)), stamps, strict=True):
            for address, size_bytes in place:
                with current(self.device_mapped.device):
                    driver.write_bytes(address, np.full(size_bytes // 4, value, np.float32).tobytes())

    def read(self, name: str, first_token: int, end_token: int) -> list[float]:
        tokens = self._tokens(self.sequences[name], first_token, end_token)
        with current(self.device_mapped.device):
            rows = [[driver.read_bytes(*part) for part in parts] for parts in tokens]
        pages = [np.stack([np.frombuffer(content, np.float32) for content in row]) for row in zip(*rows, strict=True)]
        return _one_a_token(pages)

    def keep_storing(self) -> None:
        start_thread(self.device_mapped)

    def keep_view(self) -> None:
        self._kept_address = self.device_mapped.address

    def seen_in_kept_view(self, block: int) -> float:
        with current(self.device_mapped.device):
            content = driver.read_bytes(self._kept_address + self.memory.descriptor.page_offset_bytes("k", 0, block), 4)
        return float(np.frombuffer(content, np.float32)[0])

    def _tokens(self, sequence: PoolSequence, first_token: int, end_token: int) -> list[list[tuple[int, int]]]:
        """For each token where its elements lie, (address, bytes), in every plane and layer."""
        descriptor = self.memory.descriptor
        found: list[list[tuple[int, int]]] = []
        for block, inside in zip(*_places(sequence, first_token, end_token), strict=True):
            found.append([])
            for plane in LAYOUT.planes:
                token_bytes = plane.page_bytes // BLOCK_TOKENS
                for layer in range(plane.layer_count):
                    first = descriptor.page_offset_bytes(plane.name, layer, int(block)) + int(inside) * token_bytes
                    found[-1].append((self.device_mapped.address + first, token_bytes))
        return found


def _places(sequence: PoolSequence, first_token: int, end_token: int) -> tuple[Any, Any]:
    """Block and place in it of each token."""
    positions = np.arange(first_token, end_token)
    return sequence.table[positions // BLOCK_TOKENS].astype(np.int64), positions % BLOCK_TOKENS


def _one_a_token(pages: Sequence[Any]) -> list[float]:
    """The number that a token has in all planes, layers and elements; NaN where they differ."""
    values = np.concatenate([page.reshape(len(page), -1) for page in pages], axis=1)
    return [float(value) for value in np.where((values == values[:, :1]).all(axis=1), values[:, 0], np.nan)]
