"""usage: compare.py BIN [--rounds N] [--rows WORD...]: prints a table of distrain's times beside those of peers.

BIN has the benchmark programs (build/release/bin). The commands of a group run in turns, N times (5) each, so that both
sides of a ratio see the same machine. A figure is the median over the rounds; the ratio is that of the two medians. A
peer that is not installed is left out: raw sockets and LibTorch's TensorPipeAgent are always there, Open MPI needs
mpicxx and mpirun, PyTorch a `python3` (or $PYTHON) that imports torch. --rows takes words of the rows' names."""

import argparse
import collections
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
MIB = 1 << 20
parser = argparse.ArgumentParser(usage=__doc__)
parser.add_argument("bin")
parser.add_argument("--rounds", type=int, default=5)
parser.add_argument("--rows", nargs="*", default=[])
args = parser.parse_args()
temporary = tempfile.TemporaryDirectory()


def size(count):
    return f"{count // MIB} MiB" if count >= MIB else f"{count >> 10} KiB" if count >= 1024 else f"{count} B"


def build_mpi():
    compiler = shutil.which("mpicxx.openmpi") or shutil.which("mpicxx")
    runner = shutil.which("mpirun.openmpi") or shutil.which("mpirun")
    program = os.path.join(temporary.name, "mpi")
    if not compiler or not runner:
        return None
    built = subprocess.run([compiler, "-O3", f"{HERE}/peers/mpi.cpp", "-o", program], stderr=subprocess.DEVNULL, check=False)
    return [runner, "--allow-run-as-root", "--oversubscribe", program] if built.returncode == 0 else None


def python_with_torch():
    python = os.environ.get("PYTHON", "python3")
    found = shutil.which(python) and subprocess.run([python, "-c", "import torch.distributed"], stderr=subprocess.DEVNULL,
                                                    check=False).returncode == 0
    return [python] if found else None


def mpi_command(world, op, sizes, *options):
    if not MPI:
        return None
    return [MPI[0], *options, "-n", str(world), *MPI[1:], op, *map(str, sizes)]


def echo(*options):
    return [f"{args.bin}/bench_echo", "--rounds", "4", *options]


def allreduce(world, ops, sizes=()):
    found = [f"{args.bin}/bench_allreduce", "--world", str(world), "--ops", ops]
    return found + (["--bytes", ",".join(map(str, sizes))] if sizes else [])


def hybrid(*options):
    return [f"{args.bin}/distrain", "hybrid", *map(str, options)]


MPI, TORCH = build_mpi(), python_with_torch()
CMA_OFF = ["--mca", "btl_vader_single_copy_mechanism", "none"]
LARGE = [64 << 10, MIB, 16 * MIB, 64 * MIB]
SUMS = [64 << 10, MIB, 64 * MIB]
# A group: its commands by name (None: not installed), and its rows: name, our figure, the peer's figure, and the most
# that ours may be of the peer's, if there is a target. A figure is a command, a field, and fields that select its lines.
Row = collections.namedtuple("Row", "name ours peer most")
p50 = lambda command, **where: (command, "p50_us", where)
GROUPS = []


def group(commands, rows):
    GROUPS.append((commands, rows))


for pinned, cpus in ((True, "one CPU"), (False, "two CPUs")):
    impls = "raw-unix,raw-tcp,torch-shm,torch-tcp,distrain-unix,distrain-tcp"
    group({"echo": echo("--bytes", "4", "--iterations", "2000", "--impl", impls, *(["--pin"] if pinned else []))}, [
        Row(f"echo 4 B, {cpus}, {ours} beside {peer}", p50("echo", impl=ours), p50("echo", impl=peer), most)
        for ours, peer, most in (("distrain-unix", "raw-unix", 2), ("distrain-unix", "torch-shm", None),
                                 ("distrain-tcp", "raw-tcp", None), ("distrain-tcp", "torch-tcp", None))])
sizes_text = ",".join(map(str, LARGE))
group({"ours": echo("--add", "--bytes", sizes_text, "--impl", "distrain-unix"), "mpi": mpi_command(2, "echo", LARGE),
       "no cma": mpi_command(2, "echo", LARGE, *CMA_OFF)}, [
    Row(f"echo {size(n)}, both add 1, beside Open MPI{text}{', CPU time' if field == 'cpu_us' else ''}",
        ("ours", field, {"bytes": n}), (peer, field, {"bytes": n}), 1.3 if field == "cpu_us" else most)
    for n, most in zip(LARGE, (1.5, 0.9, 0.85, 0.85)) for peer, text in (("mpi", ""), ("no cma", " without CMA"))
    for field in ("p50_us", "cpu_us")])
group({"tcp": echo("--bytes", f"{MIB},{16 * MIB},{64 * MIB}", "--impl", "raw-tcp,distrain-tcp")}, [
    Row(f"echo {size(n)}, TCP, beside raw TCP", p50("tcp", impl="distrain-tcp", bytes=n),
        p50("tcp", impl="raw-tcp", bytes=n), 1 / 0.95) for n in (MIB, 16 * MIB, 64 * MIB)])
small = ["--bytes", "4", "--impl", "distrain-unix", "--iterations", "40000"]
group({"alone": echo(*small), "beside": echo(*small, "--beside", str(1 << 30))}, [
    Row("echo 4 B, p99 beside transfers of 1 GiB, and alone", ("beside", "p99_us", {}), ("alone", "p99_us", {}), 5)])
for world in (2, 4):
    group({"ours": allreduce(world, "allreduce", SUMS), "mpi": mpi_command(world, "allreduce", SUMS)}, [
        Row(f"allreduce {size(n)}, {world} ranks, beside Open MPI", p50("ours", bytes=n), p50("mpi", bytes=n), most)
        for n, most in zip(SUMS, (0.9, 0.9, 0.75))])
    group({"ours": allreduce(world, "bucket", SUMS[-1:]), "mpi": mpi_command(world, "allreduce", SUMS[-1:])}, [
        Row(f"average of a bucket of 64 MiB, {world} ranks, beside Open MPI's allreduce", p50("ours"), p50("mpi"), 0.35)])
group({"ours": allreduce(2, "ddp"), "torch": TORCH and [*TORCH, f"{HERE}/peers/ddp_torch.py", "2"]}, [
    Row(f"step with DDP, {text}, beside PyTorch with Gloo", p50("ours", name=name), p50("torch", name=name), most)
    for name, text, most in (("ddp_16x1024", "64 MiB", 0.5), ("ddp_4x64", "65 KiB", None))])
group({"backward": [f"{args.bin}/bench_backward"]}, [
    Row("backward over one hop, beyond the local pass, beside a call", p50("backward", impl="beyond-local"),
        p50("backward", impl="echo"), 2)])
group({n: hybrid("--trainers", n, "--threads", 1, "--epochs", 6400 // n) for n in (14, 126)}, [
    Row("hybrid, time of a step over all trainers, 126 beside 14 trainers",
        (126, "step_us", {}), (14, "step_us", {}), 1 / 0.7)])
for job, epochs in (("rnn", 100), ("ps", 1)):
    one = ["--trainers", "1", "--epochs", str(epochs)]
    group({kind: [f"{args.bin}/distrain", job, *one, *(["--local"] if kind == "local" else [])]
           for kind in ("ranks", "local")}, [
        Row(f"{job}, time of a step, one trainer beside --local", ("ranks", "step_us", {}), ("local", "step_us", {}),
            1 / 0.9)])


def run(command):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}: {done.stderr.decode()[-500:]}")
    found = [json.loads(line) for line in done.stdout.decode().splitlines()]
    ends = [line for line in found if line["event"] == "end" and line.get("steps_per_s")]
    whole = [line for line in ends if line.get("scope") == "job"] or ends
    if whole:
        return [{**whole[-1], "step_us": 1e6 / whole[-1]["steps_per_s"]}]
    return found


def figure(results, command, field, where):
    values = [line[field] for line in results.get(command, [])
              if field in line and all(line.get(key) == value for key, value in where.items())]
    return statistics.median(values) if values else None


def show(us):
    return f"{us:.1f} µs" if us < 1000 else f"{us / 1000:.2f} ms"


def main():
    print(f"{platform.machine()}, {os.cpu_count()} CPUs, Linux {platform.release()}; medians of {args.rounds} rounds\n")
    print("| figure | peer | distrain | ratio | target |\n|---|---|---|---|---|", flush=True)
    for commands, rows in GROUPS:
        rows = [row for row in rows if all(word in row.name for word in args.rows)]
        needed = {row.ours[0] for row in rows} | {row.peer[0] for row in rows}
        results = collections.defaultdict(list)
        for _ in range(args.rounds if rows else 0):
            for name, command in commands.items():
                if command and name in needed:
                    results[name] += run(command)
        for row in rows:
            ours, peer = figure(results, *row.ours), figure(results, *row.peer)
            if ours is None or peer is None:
                print(f"| {row.name} | not installed | {show(ours) if ours else ''} | | |", flush=True)
                continue
            target = f"{row.most:.2f}" if row.most else ""
            print(f"| {row.name} | {show(peer)} | {show(ours)} | {ours / peer:.2f} | {target} |", flush=True)


main()
