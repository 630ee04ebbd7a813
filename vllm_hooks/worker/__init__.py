"""Worker half: encodes and decodes a rank's blocks."""
