"""Marked points in the service's process: places at which it kills itself when the harness has armed them.

The product has no code for it. `sitecustomize.py` is found through PYTHONPATH and wraps functions as they are imported.
"""
