"""What the shell offers for lists of names with commas between."""

from collections.abc import Callable, Iterable

from manthan.codec import codec_names
from manthan.policies import policy_names


def completes(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """For `autocompletion`: what was typed, and each that its last part may become."""

    def complete(incomplete: str) -> list[str]:
        done, comma, last = incomplete.rpartition(",")
        return [f"{done}{comma}{name}" for name in names() if name.startswith(last)]

    return complete


complete_policies = completes(policy_names)
complete_codecs = completes(codec_names)
