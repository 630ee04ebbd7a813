"""Routes and middleware for vLLM's server."""
