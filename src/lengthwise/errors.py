"""Errors that a user can fix. A command prints them as one line and ends with 2, never with a traceback."""


class UserError(Exception):
    """What was asked for cannot be had, and the message says what can."""


class OptionError(UserError, TypeError, ValueError):
    """An encoding does not take these options. Both kinds, since Python calls an unknown keyword a TypeError."""
