"""usage: ddp_torch.py [WORLD]: the DDP steps of bench_allreduce by PyTorch with Gloo; prints the same lines."""

import json
import os
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

NETS = (("ddp_16x1024", 16, 1024, 30), ("ddp_4x64", 4, 64, 1000))


def run(rank, world, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=world)
    for name, layers, width, rounds in NETS:
        torch.manual_seed(1)
        net = torch.nn.parallel.DistributedDataParallel(
            torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(layers)]))
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
        x = torch.randn(8, width)
        times = []
        for i in range(rounds + max(rounds // 10, 2)):
            start = time.perf_counter()
            optimizer.zero_grad()
            net(x).pow(2).mean().backward()
            optimizer.step()
            times.append(time.perf_counter() - start)
        times = sorted(times[-rounds:])
        if rank == 0:
            at = lambda q: round(times[int(q * (rounds - 1))] * 1e6, 2)
            print(json.dumps({"event": "bench", "name": name, "impl": "torch-gloo", "world_size": world,
                              "bytes": layers * (width * width + width) * 4, "calls": rounds, "p50_us": at(0.5),
                              "p90_us": at(0.9), "p99_us": at(0.99)}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    world_size = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, args=(world_size, os.path.join(folder, "store")), nprocs=world_size)
