"""Configuration: the keys, the sources, and the check against registries."""
