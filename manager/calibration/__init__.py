"""Calibrating a model: what it reads, and how its keys and values are measured."""
