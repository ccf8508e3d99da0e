"""The pools of the service, and what belongs to each."""
