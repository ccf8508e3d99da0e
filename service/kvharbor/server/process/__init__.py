"""The service's process: its life, the parts that it is made of, and what it does before it is ready."""
