"""The constants of codecs: quantizers, rotations."""
