"""An installed distribution that registers policies, as another's package would."""

from pathlib import Path

import pytest

MODULE = """
from pydantic import Field, model_validator

from manthan.policies import EvictionPolicy, PolicyOptions
from manthan.policies.lru import LRU


class Newest(LRU):
    \"\"\"The session used last goes first.\"\"\"

    name = "newest"

    def victims(self):
        return reversed(list(super().victims()))


class Options(PolicyOptions):
    rounds: int = Field(ge=1, description="a whole number of rounds, 1 or more")
    least: float = Field(default=1, description="a plain number")
    most: float = 2
    is_strict: bool = Field(default=False, description="true or false")

    @model_validator(mode="after")
    def _check_order(self):
        if self.least > self.most:
            raise ValueError(f"least must not exceed most, but {self.least} is above {self.most}")
        return self


class Picky(LRU):
    name = "picky"
    Options = Options


class Half(EvictionPolicy):
    name = "half"

    def used(self, session):
        pass


class Loose(LRU):
    name = "loose"
    Options = dict


def function():
    pass
"""
ENTRY_POINTS = """[manthan.policies]
newest = others_policies:Newest
lru = others_policies:Newest
picky = others_policies:Picky
half = others_policies:Half
loose = others_policies:Loose
function = others_policies:function
absent = others_policies:Absent
broken = others_broken:Policy
nowhere = others_nowhere:Policy
"""


@pytest.fixture
def another_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`newest` and `picky` are policies, `lru` is one that would replace ours, and the others are none."""
    folder = tmp_path / "others"
    info = folder / "others_policies-1.dist-info"
    info.mkdir(parents=True)
    (folder / "others_policies.py").write_text(MODULE)
    (folder / "others_broken.py").write_text("raise RuntimeError('not\\ntoday')")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: others-policies\nVersion: 1\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(str(folder))
