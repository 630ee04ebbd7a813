"""Checks of `manthan doctor` that do not need vLLM. Each returns findings of one sentence."""
