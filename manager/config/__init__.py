"""Configuration: its keys, its sources, and the check against registries."""
