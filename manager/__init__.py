"""The session memory manager: sessions, cold stores, configuration, command line. No vLLM, no torch."""
