"""`manthan doctor`: the command, and its checks of the model."""
