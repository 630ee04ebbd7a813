"""Importing this makes benchmarks that are not in the wheel importable as `manthan.benchmarks.NAME`."""

from pathlib import Path

import manthan.benchmarks

manthan.benchmarks.__path__.append(str(Path(__file__).parents[2] / "benchmarks"))
