"""Other projects beside ours, each in an environment of its own and in a process that takes commands over a pipe."""
