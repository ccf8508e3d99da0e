"""Traces run through the real pool, and through the best that could have been done."""
