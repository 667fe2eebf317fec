"""What an activation keeps for the backward pass, and how long it takes, in three forms.

``eager`` is the paper's algorithm in torch operations, ``checkpointed`` the same inside
``torch.utils.checkpoint``, ``fused`` the module of this project.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from polyvision.analysis.cost.flops import plain_form
from polyvision.models.language.ffn import FeedForward

__all__ = ["FORMS", "SavedTensors", "form_of", "hidden_bytes", "saved_bytes", "seconds"]

FORMS = ("eager", "checkpointed", "fused")


class SavedTensors:
    """Count the bytes that autograd keeps inside the block; a storage counts once.

    Example:
        >>> x = torch.ones(4, requires_grad=True)
        >>> with SavedTensors() as saved:
        ...     y = x.exp()
        >>> saved.bytes
        16
    """

    def __init__(self) -> None:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
        self._kept: dict[int, int] = {}
        self._alive: list[Tensor] = []  # so that no address is used twice

    def _pack(self, tensor: Tensor) -> Tensor:
        self._alive.append(tensor)
        storage = tensor.untyped_storage()
        self._kept[storage._cdata] = storage.nbytes()
        return tensor

    def __enter__(self) -> SavedTensors:
        """Start counting."""
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        """Stop counting."""
        self._hooks.__exit__(*error)

    @property
    def bytes(self) -> int:
        """Bytes kept so far."""
        return sum(self._kept.values())

    def bytes_without(self, own: Iterable[Tensor]) -> int:
        """Return the bytes kept so far but for the storages of ``own``, such as parameters."""
        left_out = {tensor.untyped_storage()._cdata for tensor in own}
        return sum(size for storage, size in self._kept.items() if storage not in left_out)


def form_of(module: nn.Module, form: str) -> Callable[..., Tensor]:
    """Return the function of an activation in one of the ``FORMS``."""
    if form == "fused":
        return module
    plain = plain_form(module)
    if form == "eager":
        return plain
    return functools.partial(checkpoint, plain, use_reentrant=False, preserve_rng_state=False)


def saved_bytes(
    module: nn.Module, form: str, shapes: Sequence[Sequence[int]], dtype: torch.dtype
) -> int:
    """Return the bytes that a forward pass keeps for the backward pass, its inputs included.

    Nothing of the given size is allocated: tensors are fake.

    Args:
        module: the activation.
        form: one of ``FORMS``.
        shapes: shape of each input.
        dtype: dtype of the inputs.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        inputs = [torch.empty(*s, dtype=dtype, requires_grad=True) for s in shapes]
        with SavedTensors() as saved:
            form_of(module, form)(*inputs)
    return saved.bytes


def hidden_bytes(
    name: str, *, width: int, hidden: int, tokens: int, dtype: torch.dtype
) -> dict[str, int]:
    """Return what a whole feed-forward network keeps of its hidden layer for the backward pass.

    Its input and weights are left out: they are the same whatever the activation. Tensors of
    ``tokens`` rows are not allocated.

    Args:
        name: registered name of the activation.
        width: size of the network's input.
        hidden: hidden size of an ungated network; a gated one takes 2/3.
        tokens: rows of the input.
        dtype: dtype of input and weights.

    Returns:
        Bytes by form: ``plain``, matrices and activation one after the other in torch operations,
        and ``recomputed``, ``FeedForward``.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        default = torch.get_default_dtype()
        torch.set_default_dtype(dtype)  # fake parameters cannot be converted
        try:
            ffn = FeedForward(width, hidden, name)
        finally:
            torch.set_default_dtype(default)
        x = torch.empty(tokens, width, dtype=dtype, requires_grad=True)
        activation = plain_form(ffn.activation)

        def plain(x: Tensor) -> Tensor:
            h = (ffn.up(x),) if ffn.gate is None else (ffn.gate(x), ffn.up(x))
            y: Tensor = ffn.down(activation(*h))
            return y

        found = {}
        given = sum(t.numel() * t.element_size() for t in (x, *ffn.parameters()))
        forms: dict[str, Callable[[Tensor], Tensor]] = {"plain": plain, "recomputed": ffn}
        for form, function in forms.items():
            with SavedTensors() as saved:
                function(x)
            found[form] = saved.bytes - given
    return found


def seconds(
    module: nn.Module,
    form: str,
    shapes: Sequence[Sequence[int]],
    dtype: torch.dtype,
    *,
    device: str = "cpu",
    repeats: int = 10,
) -> float:
    """Return the shortest time of a forward and backward pass; what else runs only adds to it.

    Args:
        module: the activation, on ``device``.
        form: one of ``FORMS``.
        shapes: shape of each input.
        dtype: dtype of the inputs.
        device: where to measure.
        repeats: passes that are timed, after one that is not.
    """
    function = form_of(module, form)
    inputs = [torch.randn(*s, device=device).to(dtype).requires_grad_() for s in shapes]
    upstream = torch.ones_like(function(*inputs))
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        torch.autograd.backward(function(*inputs), upstream)
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
        for tensor in inputs:
            tensor.grad = None
    return min(times[1:])
