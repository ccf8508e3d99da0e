"""Engines on one pool beside engines by themselves."""
