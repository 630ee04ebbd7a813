"""What `manthan doctor` looks at that has nothing to do with vLLM: each check gives findings of one sentence."""
