"""Families of models: the KV caches of each model class, and how Manthan stores them.

A family is a model class of vLLM's registry that generates text. `families.yaml` has the caches of each family. A cache
is named as vLLM's class of KV cache specs, without "Spec".
"""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from manthan.vllm_hooks.groups import SPECS, StoredAs

DENSE = ("FullAttention", "MLAAttention")
"""Caches with full attention. vLLM joins such layers into one KV cache group."""
SECTIONS = ("built", "read", "new")
OUTCOMES = {
    "coded": "compressed",
    "partly": "some groups compressed, others as bytes",
    "bytes": "as bytes, not compressed",
    "refused": "refused, or nothing to store",
}
"""Text in the table for each outcome; see `Family.outcome`."""


class Family(NamedTuple):
    """Model class of vLLM's registry.

    caches: names of its KV caches. section: "built" if the caches were found by building a model, "read" if by reading
    vLLM's source, "new" if only vLLM 0.33 has the class. uncached: reason why vLLM caches no prefixes for the class;
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
            ways = {each: way for each, way in ways.items() if each in DENSE or _kind(each) not in DENSE}
        if self.uncached or "refused" in ways.values():
            return "refused"
        found = {way for each, way in ways.items() if each != "Mamba"} or {*ways.values()}
        return "partly" if len(found) > 1 else found.pop()


def stored(name: str) -> str:
    """Return the form in which a cache is stored: "coded", "bytes" or "refused"; empty if it need not be stored.

    A name with a slash, such as "MLAAttention/indexer", is a cache with a layout that no codec knows.
    """
    way = SPECS[f"{_kind(name)}Spec"].stored
    if way is StoredAs.NOTHING:
        return ""
    return str(StoredAs.BYTES if "/" in name and way is StoredAs.CODED else way)


def _kind(name: str) -> str:
    return name.partition("/")[0]


@cache
def listed() -> dict[str, Any]:
    """Return the content of `families.yaml`: caches by section and model class; under "uncached", reasons by class."""
    found: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("families.yaml").read_text(encoding="utf-8"))
    return found


@cache
def families() -> dict[str, Family]:
    """Return all families of vLLM 0.32 and 0.33, by the name of the class."""
    uncached = listed()["uncached"]
    return {
        name: Family(name, tuple(caches.split()), section, uncached.get(name, ""))
        for section in SECTIONS
        for name, caches in listed()[section].items()
    }


def families_table() -> Iterator[str]:
    """Yield two Markdown tables: the share of families for each outcome, and the families for each set of caches."""
    every = list(families().values())
    yield "| of the families | number | share |\n|---|---|---|"
    for outcome, said in OUTCOMES.items():
        count = sum(family.outcome == outcome for family in every)
        yield f"| {said} | {count} of {len(every)} | {count / len(every):.1%} |"
    yield "\n| KV caches | stored | families |\n|---|---|---|"
    rows: dict[tuple[str, str], list[str]] = {}
    for family in every:
        said = OUTCOMES[family.outcome] + (f": {family.uncached}" if family.uncached else "")
        mark = {"built": "", "read": "\\*", "new": "†"}[family.section]
        rows.setdefault((" + ".join(family.caches), said), []).append(f"{family.name}{mark}")
    order = list(OUTCOMES.values())
    for (caches, said), names in sorted(
        rows.items(), key=lambda row: (order.index(row[0][1].split(":")[0]), -len(row[1]))
    ):
        yield f"| {caches} | {said} | {len(names)}: {', '.join(sorted(names, key=str.lower))} |"
