"""The shell around the pool: gRPC handlers, side socket, settings, logs and the command line."""
