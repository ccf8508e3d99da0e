"""The RPCs: what every call passes, message to value and back, and what calls do, unary or on a stream."""
