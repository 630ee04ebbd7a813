"""Encoded blocks on a local file system, which outlive the process."""
