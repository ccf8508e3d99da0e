"""Chaos: any process is killed at any moment, and every byte of every hit is verified. `make chaos`."""
