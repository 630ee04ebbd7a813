"""Families of models: the KV caches of each model class, and how Manthan stores them.

A family is a model class of vLLM's registry that generates text. `families.yaml` has the caches of each family. A cache
is named as vLLM's class of KV cache specs, without "Spec".
"""

from functools import cache
from pathlib import Path
from typing import NamedTuple

import yaml

from manthan.vllm_hooks.groups import SPECS, StoredAs

LIST = Path(__file__).with_name("families.yaml")
DENSE = ("FullAttention", "MLAAttention")
"""Caches with full attention. vLLM joins such layers into one KV cache group."""
SECTIONS = ("built", "read", "new")
"""Sections of the list. The caches were found by building models, or by reading vLLM's source; "new" is vLLM 0.33's."""
OUTCOMES = {
    "coded": "compressed",
    "partly": "some groups compressed, others as bytes",
    "bytes": "as bytes, not compressed",
    "refused": "refused, or nothing to store",
}
"""Text for each `Family.outcome`."""


class Family(NamedTuple):
    """Model class of vLLM's registry.

    caches: names of its KV caches. section: see `SECTIONS`. uncached: reason why vLLM caches no prefixes for the class;
    empty if vLLM does.
    """

    name: str
    caches: tuple[str, ...]
    section: str
    uncached: str

    @property
    def outcome(self) -> str:
        """Key in `OUTCOMES`. Recurrent states (Mamba) count only in a family that stores nothing else."""
        ways = {each: stored(each) for each in self.caches if stored(each)}
        if any(each in ways for each in DENSE):  # other full attention goes into the same blocks, as bytes
            ways = {each: way for each, way in ways.items() if each in DENSE or each.split("/")[0] not in DENSE}
        if self.uncached or "refused" in ways.values():
            return "refused"
        found = {way for each, way in ways.items() if each != "Mamba"} or {*ways.values()}
        return "partly" if len(found) > 1 else next(iter(found), "refused")

    def __str__(self) -> str:
        why = f": {self.uncached}" if self.uncached else ""
        return f"{self.name}: {' + '.join(self.caches)}: {OUTCOMES[self.outcome]}{why}"


def stored(name: str) -> str:
    """Return the form in which a cache is stored: "coded", "bytes" or "refused"; empty if it need not be stored.

    A name with a slash, such as "MLAAttention/indexer", is a cache with a layout that no codec knows.
    """
    kind, _, layout = name.partition("/")
    way = SPECS[f"{kind}Spec"].stored
    if way is StoredAs.NOTHING:
        return ""
    return str(StoredAs.BYTES if layout and way is StoredAs.CODED else way)


@cache
def families() -> dict[str, Family]:
    """Return all families of vLLM 0.32 and 0.33, by the name of the class."""
    listed = yaml.safe_load(LIST.read_text(encoding="utf-8"))
    return {
        name: Family(name, tuple(caches.split()), section, listed["uncached"].get(name, ""))
        for section in SECTIONS
        for caches, names in listed[section].items()
        for name in names.split()
    }
