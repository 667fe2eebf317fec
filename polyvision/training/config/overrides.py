"""Which keys a command line gives, for what must tell a given value from a default."""

from __future__ import annotations

from collections.abc import Iterable

from polyvision.errors import PolyvisionError

__all__ = ["check_validation", "given_keys"]

# What validation takes from the weights, or has no use for.
_NOT_BESIDE_VALIDATE = ("model", "act", "experiment", "finetune", "resume", "analysis", "dry_run")
_OF_RECIPE = "recipe.batch_size"


def given_keys(overrides: Iterable[str]) -> set[str]:
    """Return the keys and groups that overrides set: ``+data.options.x=1`` gives its dotted key."""
    return {text.partition("=")[0].lstrip("+~").partition("@")[0] for text in overrides}


def check_validation(overrides: Iterable[str]) -> None:
    """Refuse what ``validate=`` would not use.

    Raises:
        PolyvisionError: the network, or how it is trained, is given as well.
    """
    wrong = [
        text
        for text in overrides
        for key in given_keys([text])
        if key.partition(".")[0] in _NOT_BESIDE_VALIDATE
        or (key.partition(".")[0] == "recipe" and key != _OF_RECIPE)
    ]
    if wrong:
        raise PolyvisionError(
            f"validate= takes network and activation from the weights and trains nothing: leave "
            f"out {', '.join(wrong)}. It uses data=, {_OF_RECIPE}, precision, trainer.accelerator"
        )
