"""The devices of this process. Asks the CUDA driver, so it is used only for pools that lie on devices."""

from kvharbor.gpumem import Device, devices, driver, mps_client, visible_devices
from kvharbor.v1 import side_pb2


def device_view() -> side_pb2.DeviceView:
    """Returns what the service has to know before it hands out memory of a device. Raises CudaUnavailable."""
    seen = visible_devices()
    return side_pb2.DeviceView(
        visible_devices=[device.uuid for device in seen], mps_client=any(mps_client(device) for device in seen)
    )


def synchronize(device: Device) -> None:
    """Waits for all work of this process's primary context on the device, of every stream and thread.

    Raises DeviceFailed when something of it has failed.
    """
    with devices.current(device):
        driver.context_synchronize()
