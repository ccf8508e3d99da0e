"""What only a device can answer: `python -m gpu.measure` asks, and writes build/gpu.json."""
