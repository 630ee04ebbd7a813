"""What the shell offers behind TAB, once `manthan --install-completion` was run."""

from manthan.policies import policy_names


def complete_policies(incomplete: str) -> list[str]:
    """Names for a list of policies with commas between: what was typed, and each that its last part may become."""
    done, comma, last = incomplete.rpartition(",")
    return [f"{done}{comma}{name}" for name in policy_names() if name.startswith(last)]
