"""Which device a run uses, and in which precision it really computes."""

from __future__ import annotations

import contextlib
import dataclasses
import platform
from typing import Any

import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.profilers import PassThroughProfiler

from polyvision.errors import PolyvisionError
from polyvision.output import plural
from polyvision.training.config.schema import Config
from polyvision.training.run.ranks import Ranks

__all__ = ["Hardware", "resolve_hardware"]


@dataclasses.dataclass(frozen=True)
class Hardware:
    """Resolved device and precision.

    Attributes:
        accelerator: ``cuda`` or ``cpu``.
        devices: number of processes, each with a device of its own.
        precision: ``32``, ``bf16`` or ``fp16``, as asked for.
    """

    accelerator: str
    devices: int
    precision: str

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of matrix products and convolutions."""
        return {"32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[self.precision]

    @property
    def device_text(self) -> str:
        """Device for people."""
        if self.accelerator == "cuda":
            return f"{self.devices} x {torch.cuda.get_device_name()}"
        threads = plural(torch.get_num_threads(), "thread")
        processes = f"{self.devices} processes, " if self.devices > 1 else ""
        return f"{self.accelerator} ({platform.machine()}, {processes}{threads})"

    @property
    def precision_text(self) -> str:
        """Effective precision for people."""
        texts = {
            "32": "fp32",
            "bf16": "bf16 autocast, fp32 weights",
            "fp16": "fp16 autocast with loss scaling, fp32 weights",
        }
        return texts[self.precision]

    def trainer_arguments(self) -> dict[str, Any]:
        """Return what Lightning's Trainer needs.

        fp16 is given as a plugin: by name, Lightning turns it into bf16 on a CPU.
        """
        arguments: dict[str, Any] = {
            "accelerator": self.accelerator,
            "devices": self.devices,
            "strategy": Ranks() if self.devices > 1 else "auto",
            "profiler": _NoProfiler(),
        }
        if self.precision == "fp16":
            scaler = torch.amp.GradScaler(self.accelerator)
            arguments["plugins"] = [MixedPrecision("16-mixed", self.accelerator, scaler)]
        else:
            arguments["precision"] = "bf16-mixed" if self.precision == "bf16" else "32-true"
        return arguments


class _NoProfiler(PassThroughProfiler):
    """Lightning asks its profiler some 70 times a step; its own idle one takes 0.5 ms for that."""

    _nothing = contextlib.nullcontext()

    def profile(self, action_name: str) -> contextlib.nullcontext[None]:  # type: ignore[override]
        """Measure nothing."""
        return self._nothing


def resolve_hardware(config: Config) -> Hardware:
    """Resolve ``trainer.accelerator``, ``trainer.devices`` and ``precision`` on this machine.

    ``auto`` takes the CPU of a machine with Apple's GPU (MPS), which has no float64: validation and
    analyses add up in it.

    Raises:
        ValueError: the machine lacks the device, has fewer of them, or not the precision.
    """
    wanted = config.trainer.accelerator
    if torch.cuda.is_available():
        found, available = "cuda", torch.cuda.device_count()
    else:
        found, available = "cpu", 0
    if wanted == "gpu" and available == 0:
        if torch.backends.mps.is_available():
            raise PolyvisionError(
                "trainer.accelerator=gpu: Apple's GPU (MPS) has no float64, which validation and "
                "analyses need; use cpu or auto, which is the CPU here"
            )
        raise PolyvisionError("trainer.accelerator=gpu: no GPU is visible here; use cpu or auto")
    accelerator = "cpu" if wanted == "cpu" else found
    devices = config.trainer.devices
    if devices == "auto":
        devices = available if accelerator == "cuda" else 1
    elif accelerator != "cpu" and devices > available:
        raise PolyvisionError(f"trainer.devices={devices}: only {available} of {found} found here")
    return Hardware(accelerator, devices, config.precision)
