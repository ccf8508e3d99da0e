"""Adapters that let inference engines compute on kvharbor's memory. Each engine has a package of its own."""
