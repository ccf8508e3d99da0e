"""Figures, not tests: ratios inside one interleaved run, as shared machines drift by a factor of two."""
