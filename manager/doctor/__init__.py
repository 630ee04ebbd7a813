"""Checks of `manthan doctor` without vLLM. Each returns findings of a single sentence."""
