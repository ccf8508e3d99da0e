"""The demonstration with vLLM: two engines on one pool, of which one is killed, and the service's process with it."""
