"""How a pool's operations are run: whose turn it is, who waits for what, and what has happened."""
