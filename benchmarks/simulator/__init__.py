"""Request traces replayed through the manager."""
