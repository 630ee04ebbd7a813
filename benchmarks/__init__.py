"""What Manthan costs and what it gains, measured: scripts, and the parts they share.

Each script runs by itself (`python benchmarks/restore.py`). They are installed as `manthan.benchmarks`.
"""
