"""`manthan doctor`: the command, and what it looks at that has to do with vLLM. It also runs where that is missing."""
