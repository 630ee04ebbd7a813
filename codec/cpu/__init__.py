"""Codecs on the CPU's cores."""
