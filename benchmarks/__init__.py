"""Measurements of Manthan's costs and gains: scripts, and their common parts.

Each script runs by itself (`python benchmarks/restore.py`). Scripts install as `manthan.benchmarks`.
"""
