"""The supervisor: what outlives the service's process, and both ends of what the two tell each other."""
