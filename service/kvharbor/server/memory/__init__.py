"""The memory of pools: what is left of it, where parts come from, and who holds that of devices."""
