"""Calls on a stream: one a session, its requests in order."""
