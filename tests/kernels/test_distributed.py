"""Sharded tensors on two processes: DTensor, fully_shard, and rows split over processes."""

from __future__ import annotations

import os
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from kernel_oracles import BIAS, WEIGHT

from polyvision import PolyNorm
from polyvision import functional as F

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")
PROCESSES = 2


def on_all_processes(rank, path):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=PROCESSES)
    mesh = dist.device_mesh.init_device_mesh("cpu", (PROCESSES,))
    check_dtensor(mesh)
    check_fully_shard(mesh)
    check_split_rows(rank)
    dist.barrier()
    # All checks have passed. DTensor's caches, among others, keep the group alive after
    # destroy_process_group, and with it gloo's threads. One that frees the tensor of the last
    # collective while the interpreter shuts down gets no lock, and the process aborts.
    os._exit(0)


def value_and_gradients(function, inputs, grad):
    inputs = [v.detach().requires_grad_() for v in inputs]
    y = function(*inputs)
    return [y.detach(), *torch.autograd.grad(y, inputs, grad)]


def check_dtensor(mesh):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    torch.manual_seed(0)
    x, mul, grad = torch.randn(3, 5, 6, 8)

    def gated(x, w, b, mul):
        return F.poly_norm(x, w, b, dim=1, mul=mul)

    for function in (gated, lambda x, w, b, mul: F.poly_relu(x, w, b, mul=mul)):
        inputs = [x, WEIGHT[:3], BIAS, mul]
        whole = value_and_gradients(function, inputs, grad)
        for dim in range(3):

            def place(v, dim=dim):
                placement = Shard(dim) if v.ndim == 3 else Replicate()
                return distribute_tensor(v, mesh, [placement])

            sharded = value_and_gradients(function, [place(v) for v in inputs], place(grad))
            stays = function is not gated or dim != 1
            assert sharded[0].placements == ((Shard(dim) if stays else Replicate()),)
            for ours, exact in zip(sharded, whole, strict=True):
                torch.testing.assert_close(ours.full_tensor(), exact, rtol=1e-5, atol=1e-5)


def check_fully_shard(mesh):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), PolyNorm(), torch.nn.Linear(16, 4))
    fully_shard(model[1], mesh=mesh)
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.randn(5, 8)).float().square().sum().backward()
        optimizer.step()
    weight = model[1].weight.full_tensor()
    assert weight.dtype == torch.float32
    assert weight.unique().numel() == 3  # trained: no longer all 1/3


def check_split_rows(rank):
    torch.manual_seed(0)
    x, grad = torch.randn(2, 7, 12)
    whole = value_and_gradients(F.poly_norm, [x, WEIGHT[:3], BIAS], grad)
    mine = slice(rank * 6, rank * 6 + 6)

    def split(part, weight, bias):
        from torch.distributed.nn.functional import all_reduce

        stats = all_reduce(F.poly_norm_stats(part, 3))
        return F.poly_norm_apply(part, stats, weight, bias, n=12)

    y, dx, *sums = value_and_gradients(split, [x[:, mine], WEIGHT[:3], BIAS], grad[:, mine])
    for total in sums:  # each process saw its part of every row
        dist.all_reduce(total)
    torch.testing.assert_close(y, whole[0][:, mine], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(dx, whole[1][:, mine], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(sums, whole[2:], rtol=1e-5, atol=1e-5)


def test_two_processes():
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(on_all_processes, args=(f"{folder}/store",), nprocs=PROCESSES)
