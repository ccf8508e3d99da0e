"""Request traces: what was asked of a cache and when, never any text. One format a file, one model for all."""
