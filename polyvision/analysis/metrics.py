"""Which way each metric improves, in one table: best weights and comparisons read it here."""

from __future__ import annotations

__all__ = ["higher_is_better"]

# A metric's own name is the last part of its tag: ``val/c4/loss`` is a loss, of a set named c4.
_HIGHER_IS_BETTER = {
    "loss": False,  # nats per token or per image
    "ppl": False,  # perplexity
    "bpb": False,  # bits per byte
    "acc1": True,  # top-1 accuracy
    "acc5": True,  # top-5 accuracy
}


def higher_is_better(tag: str) -> bool | None:
    """Tell which way a metric improves; None for a metric whose name is not known.

    Args:
        tag: such as ``val/acc1`` or ``val/<name of a validation set>/loss``. Only the last part
            counts, so the name of a validation set can be anything.
    """
    return _HIGHER_IS_BETTER.get(tag.rpartition("/")[2])
