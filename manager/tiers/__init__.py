"""Where codes lie, and who keeps the books of it."""
