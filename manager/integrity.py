"""What is raised where books do not agree with themselves."""


class IntegrityError(AssertionError):
    """Says in one sentence what does not agree."""
