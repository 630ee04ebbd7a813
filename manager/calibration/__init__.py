"""Calibration of a model: the text to read, and the measurement of keys and values."""
