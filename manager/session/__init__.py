"""Sessions and their blocks: what is stored, loaded and dropped, and when."""
