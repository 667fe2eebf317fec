"""What a swap did to a network: its sites and what stays, in one record that prints as a table."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Literal, get_args

from polyvision.models.trace.call import Call, Execution

__all__ = ["ROLES", "Kept", "Role", "Site", "SwapReport"]

How = Literal["module", "unshared", "function", "expression"]
Role = Literal["stem", "block", "head", "gate", "mlp", "kernel", "positive"]
ROLES: tuple[Role, ...] = get_args(Role)


@dataclasses.dataclass
class Site:
    """An activation that is, or could be, replaced by a module of its own.

    Attributes:
        name: dotted name of that module in the network.
        was: class of the module or name of the function, with brackets, that it replaces.
        how: ``module`` in the place of one; ``unshared``, taken out of a module that served several
            sites; ``function``, in the place of a function call; ``expression``, in the place of an
            activation written by hand.
        role: ``stem``, ``block``, ``head``, ``gate``, ``mlp``, ``kernel`` or ``positive``.
        dim: the feature dimension: 1 for NCHW, -1 for channel-last; None for a pointwise one.
        calls: how often one forward pass runs the module, in eval mode if it does so there; above
            1, its calls share coefficients.
        sources: its calls in the source: several where no rewrite could tell them apart.
        seen: the executions of one forward pass.
        training: the site is only reached in training mode.
        no_dim: why ``dim`` cannot be told.
    """

    name: str
    role: Role = "block"
    dim: int | None = None
    calls: int = 0
    sources: list[Call] = dataclasses.field(default_factory=list, repr=False)
    seen: list[Execution] = dataclasses.field(default_factory=list, repr=False, compare=False)
    training: bool = dataclasses.field(default=False, repr=False)
    no_dim: str = dataclasses.field(default="", repr=False)

    @property
    def source(self) -> Call:
        """The first call."""
        return self.sources[0]

    @property
    def was(self) -> str:
        """Class of the module, or name of the function with brackets."""
        return self.source.kind if self.source.module is not None else f"{self.source.kind}()"

    @property
    def how(self) -> How:
        """What the new module stands in the place of."""
        if self.source.module is None:
            return "expression" if self.source.expression else "function"
        return "unshared" if self.rewritten else "module"

    @property
    def rewritten(self) -> bool:
        """Whether the source must change for the site to have a module of its own."""
        return self.source.module != self.name

    def kept(self, reason: str) -> Kept:
        """Return the record of an activation that stays."""
        return Kept(self.name, self.was, reason, self.role)


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
