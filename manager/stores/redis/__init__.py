"""A cold store in Redis."""
