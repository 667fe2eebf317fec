"""The cost of activations as a result: Tables 8 and 9 of the paper, and the sites of a model.

Source: Zhuo et al. 2024, https://arxiv.org/abs/2411.03884 (appendix F).
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from polyvision.activations import (
    activation_info,
    activation_modules,
    activation_names,
    create_activation,
)
from polyvision.analysis.cost.flops import count_flops, flops_per_element, matrix_counter
from polyvision.analysis.cost.saved_bytes import FORMS, hidden_bytes, saved_bytes, seconds
from polyvision.analysis.layers import inference, watch_outputs
from polyvision.analysis.result import Result, text_table
from polyvision.output import plural

__all__ = ["PAPER_METHODS", "analyse_cost", "cost_tables"]

_MIB = 2**20
# Saved elements in units of BSH, as Table 8 prints them for order 3.
_PAPER_MEMORY = {"relu": 4, "gelu": 10, "swiglu": 8, "relu2": 8, "polynorm": 12, "polyrelu": 8}
PAPER_METHODS = tuple(_PAPER_MEMORY)
# The paper's example: one feed-forward network on an input of shape (B, S, H).
_WIDTH, _BATCH, _LENGTH, _DTYPE = 1024, 4, 4096, torch.bfloat16


def cost_tables(*, device: str = "cpu", rows_timed: int = 512, repeats: int = 10) -> Result:
    """Compute Tables 8 and 9 (H=1024, B=4, S=4096, bf16) beside bytes really saved and time.

    Every registered activation has a row; the formulas for memory exist for the paper's six only.
    With f FLOPs per hidden element (``flops_per_element``) and a hidden layer of cH features, c = 4
    or 8/3 when gated, the activation takes f c BSH FLOPs, twice that when it is computed again in
    the backward pass. The ratio divides by 24 B S H^2, the forward matrix work of a whole
    transformer layer, with attention's projections; the paper calls it that of the FFN, which alone
    is 16 B S H^2. Memory is the printed multiple of BSH; under checkpointing the paper counts 0.

    Bytes are those of tensors of the full size, which are not allocated. Times are measured on
    ``rows_timed`` rows of the same hidden layer. A second table is about whole feed-forward
    networks: what they keep of the hidden layer for each token.

    Args:
        device: where times are measured.
        rows_timed: rows (tokens) of the timed input.
        repeats: timed passes, of which the shortest counts.
    """
    names = [*PAPER_METHODS, *(n for n in activation_names() if n not in PAPER_METHODS)]
    records = [_record(name, device, rows_timed, repeats) for name in names]
    header = ["activation", "hidden", "FLOPs/BSH", "ratio", "with ckpt", "paper MiB"]
    header += [f"{form} MiB" for form in FORMS] + [f"{form} ms" for form in FORMS]
    table = [
        [r["name"], r["hidden"], r["flops_per_bsh"]]
        + [f"{100 * r[k]:#.2g} %" for k in ("ratio", "ratio_checkpointed")]
        + [None if r["paper_bytes"] is None else r["paper_bytes"] // _MIB]
        + [round(r["saved_bytes"][form] / _MIB) for form in FORMS]
        + [f"{1e3 * r['seconds'][form]:.1f}" for form in FORMS]
        for r in records
    ]
    scalars = {
        f"{r['name']}/{form}_bytes": float(r["saved_bytes"][form])
        for r in records
        for form in FORMS
    }
    setting = {
        "width": _WIDTH,
        "batch": _BATCH,
        "length": _LENGTH,
        "dtype": "bf16",
        "rows_timed": rows_timed,
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    series = {form: [r["saved_bytes"][form] / _MIB for r in records] for form in FORMS}
    note = f"H={_WIDTH}, B={_BATCH}, S={_LENGTH}, bf16; times forward and backward of {rows_timed} "
    note += f"rows, {setting['device']}, {plural(torch.get_num_threads(), 'thread')}"
    return Result(
        "cost",
        scalars,
        {"setting": setting, "activations": records},
        _bars(names, series, "MiB kept for the backward pass"),
        f"{text_table(header, table)}\n{note}\n\n{_hidden_layer_table(records)}",
    )


def _hidden_layer_table(records: list[dict[str, Any]]) -> str:
    """Show what a whole feed-forward network keeps of its hidden layer for each token."""
    swiglu = next(r["hidden_bytes"]["plain"] for r in records if r["name"] == "swiglu")
    tokens = _BATCH * _LENGTH
    rows: list[list[object]] = []
    for r in records:
        kept = r["hidden_bytes"]
        paper = None if r["paper_bytes"] is None else round(r["paper_bytes"] / tokens)
        rows.append(
            [r["name"], paper, round(kept["plain"] / tokens), round(kept["recomputed"] / tokens)]
            + [f"{kept['recomputed'] / kept['plain']:.2f}", f"{kept['recomputed'] / swiglu:.2f}"]
        )
    header = ["bytes a token, whole FFN", "paper, Table 8", "plain", "recomputed"]
    text = text_table([*header, "recomputed/plain", "recomputed/plain swiglu"], rows)
    return f"{text}\nkept of the hidden layer for the backward pass; with checkpointing 0 (Table 9)"


def _record(name: str, device: str, rows: int, repeats: int) -> dict[str, Any]:
    gated = activation_info(name).kind == "gated"
    hidden, inputs = (8 * _WIDTH // 3, 2) if gated else (4 * _WIDTH, 1)
    module = create_activation(name).to(device)
    flops = flops_per_element(name) * (8 / 3 if gated else 4)
    full, timed = [(_BATCH, _LENGTH, hidden)] * inputs, [(rows, hidden)] * inputs
    tokens = _BATCH * _LENGTH
    paper = _PAPER_MEMORY.get(name)
    return {
        "name": name,
        "hidden": "8H/3" if gated else "4H",
        "flops_per_bsh": flops,
        "ratio": flops / (24 * _WIDTH),
        "ratio_checkpointed": 2 * flops / (24 * _WIDTH),
        "paper_bytes": None if paper is None else paper * tokens * _WIDTH * _DTYPE.itemsize,
        "saved_bytes": {form: saved_bytes(module, form, full, _DTYPE) for form in FORMS},
        "hidden_bytes": hidden_bytes(
            name, width=_WIDTH, hidden=4 * _WIDTH, tokens=tokens, dtype=_DTYPE
        ),
        "seconds": {
            form: seconds(module, form, timed, _DTYPE, device=device, repeats=repeats)
            for form in FORMS
        },
    }


def analyse_cost(model: nn.Module, inputs: Tensor, *, timed: bool = True) -> Result:
    """Measure what the activations of ``model`` cost on one batch.

    For each site: FLOPs by the paper's rules, bytes kept for the backward pass and time of a
    forward and backward pass, in the three forms. The ratio divides by the FLOPs of the model's
    matrix products, convolutions and attention (two for a multiply-add) in one forward pass.

    Args:
        model: the network.
        inputs: one batch.
        timed: measure times; without, they are left out.
    """
    sites = activation_modules(model)
    shapes: dict[str, list[torch.Size]] = {}
    dtypes: dict[str, torch.dtype] = {}

    def see(name: str, args: tuple[Any, ...], output: Tensor) -> None:
        shapes[name] = [x.shape for x in args]
        dtypes[name] = output.dtype

    counter = matrix_counter()
    with inference(model), watch_outputs(sites, see), counter:
        model(inputs)
    matrix_flops = counter.get_total_flops()
    records = []
    for name, site_shapes in shapes.items():
        module, dtype = sites[name], dtypes[name]
        elements = site_shapes[0].numel()
        record: dict[str, Any] = {
            "site": name,
            "shape": list(site_shapes[0]),
            "flops": elements * count_flops(module, len(site_shapes)),
            "saved_bytes": {f: saved_bytes(module, f, site_shapes, dtype) for f in FORMS},
        }
        if timed:
            device = str(inputs.device.type)
            record["seconds"] = {
                f: seconds(module, f, site_shapes, dtype, device=device, repeats=3) for f in FORMS
            }
        records.append(record)
    return _model_result(records, matrix_flops, timed)


def _model_result(records: list[dict[str, Any]], matrix_flops: int, timed: bool) -> Result:
    measures = ["saved_bytes", *(["seconds"] if timed else [])]
    total: Mapping[str, float] = {
        "flops": sum(r["flops"] for r in records),
        **{f"{f}_{m}": sum(r[m][f] for r in records) for m in measures for f in FORMS},
    }
    scalars = {name: float(value) for name, value in total.items()}
    scalars["flops_ratio"] = total["flops"] / matrix_flops
    header = ["site", "shape", "MFLOP"] + [f"{f} MiB" for f in FORMS]
    rows = [
        [r["site"], "x".join(map(str, r["shape"])), r["flops"] / 1e6]
        + [r["saved_bytes"][f] / _MIB for f in FORMS]
        + ([1e3 * r["seconds"][f] for f in FORMS] if timed else [])
        for r in records
    ]
    if timed:
        header += [f"{f} ms" for f in FORMS]
    text = text_table(header, rows)
    text += f"\nall activations: {100 * scalars['flops_ratio']:.3g} % of the FLOPs of the model's "
    text += f"matrix products, convolutions and attention ({matrix_flops / 1e9:.3g} GFLOP forward)"
    series = {f: [r["saved_bytes"][f] / _MIB for r in records] for f in FORMS}
    names = [r["site"] for r in records]
    data = {"sites": records, "matrix_flops": matrix_flops}
    return Result("cost", scalars, data, _bars(names, series, "MiB kept for backward"), text)


def _bars(names: list[str], series: Mapping[str, list[float]], label: str) -> Figure:
    figure = Figure(figsize=(7, 1.4 + 0.3 * len(names)), layout="constrained")
    axes = figure.subplots()
    height = 0.8 / len(series)
    for i, (form, values) in enumerate(series.items()):
        places = [place + i * height for place in range(len(names))]
        axes.barh(places, values, height, label=form)
    axes.set_yticks([place + height for place in range(len(names))], names)
    axes.invert_yaxis()
    axes.set_xlabel(label)
    axes.legend(fontsize="small")
    return figure
