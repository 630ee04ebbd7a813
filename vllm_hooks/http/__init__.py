"""Routes and middleware that vLLM's own server gets."""
