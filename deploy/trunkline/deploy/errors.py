"""Errors before and during the run of a cluster that a person can do something about."""

from __future__ import annotations


class DeployError(Exception):
    """Base of the errors that the command line shows as one line instead of a traceback."""

    exit_code = 1


class UserError(DeployError):
    """The command asks for something impossible; nothing was started. Exit code 2.

    The message says what was given, what is allowed and, where it is not obvious, what to do.
    """

    exit_code = 2
