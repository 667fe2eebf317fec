"""What a swap did to a network: one record, printable as one table."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Literal

from polyvision.models.swap.sites import Role

__all__ = ["Kept", "Site", "SwapReport"]

How = Literal["module", "unshared", "function", "expression"]


@dataclasses.dataclass(frozen=True)
class Site:
    """One place that holds the new activation.

    Attributes:
        name: the new module's name in the network.
        was: class of the module or name of the function that it replaced.
        how: ``module`` in the place of one; ``unshared``, taken out of a module that served several
            sites; ``function``, in the place of a function call; ``expression``, in the place of an
            activation written by hand.
        role: ``stem``, ``block``, ``head``, ``gate``, ``mlp``, ``kernel`` or ``positive``.
        dim: the feature dimension: 1 for NCHW, -1 for channel-last; None for a pointwise one.
        calls: how often one forward pass runs the module; above 1, its calls share coefficients.
    """

    name: str
    was: str
    how: How
    role: Role
    dim: int | None
    calls: int = 1


@dataclasses.dataclass(frozen=True)
class Kept:
    """An activation that stays.

    Attributes:
        name: name of the module, or the one that a call of a function would have got.
        was: class of the module or name of the function.
        reason: why it stays.
        role: as for a site; None for what no pass calls and for norms.
    """

    name: str
    was: str
    reason: str
    role: Role | None = None


@dataclasses.dataclass(frozen=True)
class SwapReport:
    """The result of ``swap_activations``; ``str()`` of it is a table.

    Attributes:
        activation: name of the new activation.
        sites: the places that hold it, in order of execution.
        kept: activations that stay for a reason: gates, and what was not asked for.
        leftovers: activations that were to be replaced and could not be.
        parameters_added: parameters of the network after the swap less those before.
        notes: what else to know.
    """

    activation: str
    sites: tuple[Site, ...]
    kept: tuple[Kept, ...]
    leftovers: tuple[Kept, ...]
    parameters_added: int
    notes: tuple[str, ...] = ()

    @property
    def gates(self) -> tuple[Kept, ...]:
        """The kept gates."""
        return tuple(kept for kept in self.kept if kept.role == "gate")

    def summary(self) -> str:
        """Return the counts in one line."""
        how = Counter(site.how for site in self.sites)
        more = [f"{how[h]} {text}" for h, text in _HOW.items() if how[h]]
        dims = Counter(site.dim for site in self.sites if site.dim is not None)
        more += [f"{dims[d]} over dim {d}" for d in sorted(dims, reverse=True)]
        sites = f"{self.activation} at {len(self.sites)} sites" + (
            f" ({', '.join(more)})" if more else ""
        )
        return (
            f"{sites}; {len(self.kept)} kept, of them {len(self.gates)} gates; "
            f"{len(self.leftovers)} left over; {self.parameters_added:,} parameters added"
        )

    def __str__(self) -> str:
        rows = [("site", "was", "how", "role", "dim", "calls")]
        for s in self.sites:
            dim = "-" if s.dim is None else str(s.dim)
            rows.append((s.name, s.was, s.how, s.role, dim, str(s.calls)))
        rows += [(k.name, k.was, f"kept: {k.reason}", "", "", "") for k in self.kept]
        rows += [(k.name, k.was, f"LEFT: {k.reason}", "", "", "") for k in self.leftovers]
        return "\n".join([*_table(rows), "", self.summary(), *self.notes])


_HOW: dict[How, str] = {
    "unshared": "unshared",
    "function": "in place of functions",
    "expression": "in place of expressions",
}


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    # The reason for what stays may run over the columns to its right.
    whole = [row for row in rows if row[3]]
    columns = range(len(rows[0]))
    widths = [max(len(row[i]) for row in (rows if i < 2 else whole)) for i in columns]
    padded = (map(str.ljust, row, widths) for row in rows)
    return ["  ".join(cells).rstrip() for cells in padded]
