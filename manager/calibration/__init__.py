"""Calibration of a model: the text that it reads, and the measurement of its keys and values."""
