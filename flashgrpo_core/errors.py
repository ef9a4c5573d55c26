"""The one exception type that is meant to be read by the user."""

from __future__ import annotations


class FlashGRPOError(Exception):
    """Bad input or an impossible request.

    The message is one line that names the offending value, the limit it breaks and the fix.
    The command line prints it and exits with status 2; ComfyUI shows it on the node.
    """


class NotFinite(FlashGRPOError):
    """The transformer gave NaN or infinite latents."""


class NoUpdate(FlashGRPOError):
    """Several iterations in a row could not change the policy."""


class Cancelled(Exception):
    """Training was stopped on request; the run folder is resumable."""
