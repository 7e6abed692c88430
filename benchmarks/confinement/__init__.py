"""Owns the measurement of what the judging processes' confinement costs in judgements per second."""
