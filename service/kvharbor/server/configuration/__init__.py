"""Settings: each once, where values come from, and logs."""
