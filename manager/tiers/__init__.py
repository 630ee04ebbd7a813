"""Tiers of compressed blocks, and the records of sessions that outlive the engine."""
