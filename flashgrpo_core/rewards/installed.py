"""Rewards of other installed packages: entry points of the group `flashgrpo.rewards`.

A package names its reward class in its own metadata; nothing of ours is imported by it, because
inside ComfyUI this package has no name of its own. Only packages that the user has installed are
found: a workflow or a configuration file can name a reward, but never bring code.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from ..errors import FlashGRPOError

#: Entry point group that packages declare.
GROUP = "flashgrpo.rewards"


@dataclass(frozen=True)
class Installed:
    """A reward that a package offers; its code is not loaded before it is used."""

    entry: EntryPoint

    @property
    def package(self) -> str:
        """Name and version of the package, for messages."""
        dist = self.entry.dist
        return f"{dist.name} {dist.version}" if dist is not None else "an unnamed package"

    def load(self) -> type[Any]:
        """The reward class.

        Raises:
            FlashGRPOError: the package cannot be imported, or the class is no reward.
        """
        try:
            cls = self.entry.load()
        except Exception as exc:  # whatever a foreign module does when it is imported
            text = " ".join(str(exc).split())[:200] or type(exc).__name__
            raise FlashGRPOError(
                f"reward {self.entry.name!r} of {self.package} cannot be loaded: {text}: repair or "
                "remove that package"
            ) from None
        scores = callable(getattr(cls, "score", None))
        compares = callable(getattr(cls, "features", None)) and callable(
            getattr(cls, "compare", None)
        )
        if not isinstance(cls, type) or not (scores or compares):
            raise FlashGRPOError(
                f"reward {self.entry.name!r} of {self.package} is no class with "
                "score(batch): its package must be changed"
            )
        if getattr(cls, "name", None) != self.entry.name:
            raise FlashGRPOError(
                f"reward {self.entry.name!r} of {self.package} has name = "
                f"{getattr(cls, 'name', None)!r}: both names must be the same"
            )
        if compares and not isinstance(getattr(cls, "feature_size", None), int):
            raise FlashGRPOError(
                f"reward {self.entry.name!r} of {self.package} compares videos but has no "
                "feature_size: give the length of its feature vectors"
            )
        return cls


def installed_rewards() -> dict[str, Installed]:
    """The rewards that installed packages offer, by name; names of our own rewards are left out."""
    from . import REWARDS

    found = sorted(entry_points(group=GROUP), key=lambda entry: entry.name)
    return {entry.name: Installed(entry) for entry in found if entry.name not in REWARDS}
