"""What can be configured, where a value may come from, and what is registered."""
