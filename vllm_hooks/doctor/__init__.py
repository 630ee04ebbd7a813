"""`manthan doctor`: the command."""
