"""Constants of the codecs: frequencies and rotations."""
