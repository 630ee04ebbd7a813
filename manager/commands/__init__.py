"""The `manthan` command's parts."""
