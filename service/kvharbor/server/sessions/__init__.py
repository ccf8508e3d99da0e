"""Who is connected: engines, their processes, and the proof that these are gone."""
