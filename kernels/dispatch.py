"""Platform -> ordered implementations of an operation, with the reason for every refusal.

An operation's package lists its implementations in a table; each is a module of that package,
imported only when its turn comes, whose `supports(...)` raises NotImplementedError to refuse.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType


@dataclass(frozen=True)
class Choice:
    """The implementation that runs, and why those before it do not.

    Attributes:
      name: the implementation, one of the names in the operation's table.
      module: its module.
      refusals: (name, reason) of each better implementation that refused, in table order.
    """

    name: str
    module: ModuleType
    refusals: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        """One line for a start-up log."""
        reasons = "; ".join(f"{name} refused: {reason}" for name, reason in self.refusals)
        return f"{self.name} ({reasons})" if reasons else self.name


def choose(
    package: str,
    table: Mapping[str, tuple[str, ...]],
    *,
    platform: str,
    requested: str | None,
    supports: Callable[[ModuleType], None],
) -> Choice:
    """Returns the first implementation of an operation that supports the call at hand.

    Args:
      package: the operation's package, whose modules are the implementations.
      table: platform -> names of its implementations, best first.
      platform: `cpu`, `gpu` or `tpu`.
      requested: the only implementation to consider, or None for the table's order.
      supports: asks one implementation; it raises NotImplementedError(reason) to refuse.

    Raises:
      ValueError: the platform is unknown, or it has no implementation called `requested`.
      NotImplementedError: every implementation considered refuses; says why each did.
    """
    if platform not in table:
        raise ValueError(f"platform {platform!r} is unknown to {package}: pass one of {[*table]}")
    names = table[platform]
    if requested is not None and requested not in names:
        raise ValueError(
            f"{package} has no implementation {requested!r} for {platform}: pass one of "
            f"{[*names]}, or None for the best that fits"
        )
    refusals: list[tuple[str, str]] = []
    for name in names if requested is None else (requested,):
        try:
            module = import_module(f"{package}.{name}")
            supports(module)
        except ModuleNotFoundError as missing:
            if (missing.name or "").partition(".")[0] == __package__:
                raise  # one of ours: a mistake, not a machine that lacks something
            refusals.append((name, f"{missing.name} is not installed"))
        except NotImplementedError as refusal:
            refusals.append((name, str(refusal)))
        else:
            return Choice(name, module, tuple(refusals))
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refusals)
    raise NotImplementedError(f"{package} cannot run this on {platform}. {reasons}")
