"""Sessions and their blocks: stores, loads and drops, and their times."""
