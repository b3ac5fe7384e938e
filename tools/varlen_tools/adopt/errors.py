"""The error of `varlen adopt`."""


class AdoptError(Exception):
    """The model cannot be adopted; the message says why, and what to do."""
