"""The one error of the experiments that a user can act upon."""


class RunError(ValueError):
    """A wish that cannot be met; the command line prints it as one line and exits with 1."""
