"""What Manthan does at vLLM's own server."""
