"""The heart: sessions, their blocks, and what is decided about them. No I/O, no clock, no thread."""
