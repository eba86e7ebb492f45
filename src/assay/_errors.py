"""The error for something that a user gave."""


class InputError(ValueError):
    """What a user gave is wrong; the message says in one sentence what was expected and what to do."""
