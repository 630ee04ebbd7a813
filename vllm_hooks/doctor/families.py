"""Families of models: the KV caches of each model class, and how Manthan stores them.

A family is a model class of vLLM's registry that generates text. `families.yaml` has the caches of each family. A cache
is named as vLLM's class of KV cache specs, without "Spec".
"""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import yaml

from manthan.vllm_hooks.groups import SPECS, StoredAs

LIST = Path(__file__).with_name("families.yaml")
DENSE = ("FullAttention", "MLAAttention")
"""Caches with full attention. vLLM joins such layers into one KV cache group."""
SECTIONS = {"built": "", "read": "\\*", "new": "†"}
"""Mark of a class in the table, by section: "built" if the class's caches were found by building a model, "read" if by
reading vLLM's source, "new" if only vLLM 0.33 has the class."""
OUTCOMES = {
    "coded": "compressed",
    "partly": "some groups compressed, others as bytes",
    "bytes": "as bytes, not compressed",
    "refused": "refused, or nothing to store",
}
"""Text in the table for each outcome; see `Family.outcome`."""


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
    found = {}
    for section in SECTIONS:
        caches = {name: caches for caches, names in listed[section].items() for name in names.split()}
        for name in sorted(caches, key=str.lower):
            found[name] = Family(name, tuple(caches[name].split()), section, listed["uncached"].get(name, ""))
    return found


def families_table() -> Iterator[str]:
    """Yield two Markdown tables: the share of families for each outcome, and the families for each set of caches."""
    every = list(families().values())
    yield "| of the families | number | share |\n|---|---|---|"
    for outcome, said in OUTCOMES.items():
        count = sum(family.outcome == outcome for family in every)
        yield f"| {said} | {count} of {len(every)} | {count / len(every):.1%} |"
    yield "\n| KV caches | stored | families |\n|---|---|---|"
    rows: dict[tuple[str, str], list[Family]] = {}
    for family in every:
        rows.setdefault((" + ".join(family.caches), family.uncached), []).append(family)
    order = list(OUTCOMES)
    for (caches, uncached), row in sorted(
        rows.items(), key=lambda each: (order.index(each[1][0].outcome), -len(each[1]))
    ):
        said = OUTCOMES[row[0].outcome] + (f": {uncached}" if uncached else "")
        names = sorted((f"{family.name}{SECTIONS[family.section]}" for family in row), key=str.lower)
        yield f"| {caches} | {said} | {len(row)}: {', '.join(names)} |"
