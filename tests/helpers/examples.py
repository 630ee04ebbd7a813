"""How many examples a property test tries: as many as it asks for, or a fifth with the profile `quick`."""

from hypothesis import Phase, settings

ALL = 100  # of a test that asks for no number


def register() -> None:
    """`pytest --hypothesis-profile quick` is what `make test` does; `unshrunk` ends at the first failure."""
    settings.register_profile("quick", max_examples=ALL // 5, deadline=None)
    settings.register_profile("unshrunk", max_examples=ALL // 5, phases=[Phase.generate], deadline=None)


def examples(count: int) -> int:
    """So many with the present profile."""
    return count * settings().max_examples // ALL
