"""Trains each job on the CPU and on the GPU with the same seeds and batches, and compares the losses.

usage: compare_jobs.py DISTRAIN [SECONDS]

A GPU rounds differently from a CPU, and training amplifies the difference with each step. A third run, on the CPU with
a learning rate that differs by NUDGE, measures the amplification. A value of the GPU may differ by FLOOR plus FACTOR
times the largest difference of the third run so far. Values after a difference of more than CHAOS are not compared.

Prints a JSON line for each job and placement on devices. Exits with 1 if values differ by more than allowed, or if a
job takes longer than SECONDS (120).
"""

import json
import os
import pathlib
import random
import struct
import subprocess
import sys
import tempfile
import time

# Differences are relative to the CPU's value if its absolute value is above 1.
NUDGE = 1e-4
FLOOR = 1e-4
FACTOR = 10
CHAOS = 1e-2
# Without this, convolutions and LSTMs would round to TF32 and differ by more than allowed.
ENVIRONMENT = {**os.environ, "NVIDIA_TF32_OVERRIDE": "0"}

# The options of all runs, the event with the losses, and the placements on GPUs. Jobs have `--mode sync` or one
# trainer, because results must not depend on the order of the trainers' updates.
JOBS = {
    "hybrid": (["--mode", "sync", "--steps", "20", "--log-interval", "1"], "step", [
        ["--device", "cuda"],
        ["--device", "server=cpu,trainer=cuda"],
        ["--device", "server=cuda,trainer=cpu"],
    ]),
    "ps": (["--mode", "sync", "--steps", "20", "--log-interval", "1", "--dropout", "off"], "step", [
        ["--device", "cuda"],
        ["--device", "cuda", "--num-gpus", "1"],
    ]),
    "rnn": (["--trainers", "2", "--mode", "sync", "--steps", "20", "--log-interval", "1",
             "--dropout", "0"], "step", [
        ["--device", "cuda"],
    ]),
    "pipeline": (["--model", "resnet18", "--image-size", "64", "--batch-size", "16", "--classes",
                  "10", "--micro-batches", "2", "--batches", "20", "--log-interval", "1"], "step", [
        ["--device", "cuda"],
    ]),
    # rl logs no loss, so the rewards of 20 episodes are compared.
    "rl": (["--max-episodes", "20", "--log-interval", "1"], "episode", [
        ["--device", "cuda"],
    ]),
}
VALUE = {"step": "loss", "episode": "running_reward"}


def write_images(folder: pathlib.Path) -> None:
    """Writes MNIST's files with random images: 1,280 for training, 32 for testing."""
    folder.mkdir()
    source = random.Random(1)
    for part, count in (("train", 1280), ("t10k", 32)):
        images = source.randbytes(count * 28 * 28)
        labels = bytes(source.randrange(10) for _ in range(count))
        (folder / f"{part}-images-idx3-ubyte").write_bytes(
            struct.pack(">IIII", 2051, count, 28, 28) + images)
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 2049, count) + labels)


def run(binary: str, job: str, options: list[str], event: str,
        limit_s: float) -> tuple[dict, dict]:
    """Runs a job. Returns the values by role and step, and other fields for the report."""
    start = time.monotonic()
    try:
        done = subprocess.run([binary, job, *options], capture_output=True, text=True, check=False,
                              timeout=limit_s, env=ENVIRONMENT)
    except subprocess.TimeoutExpired:
        return {}, {"exit_code": None, "error": f"no end after {limit_s:g} s",
                    "wall_s": round(time.monotonic() - start, 2)}
    values, told = {}, {"exit_code": done.returncode}
    for row in done.stdout.splitlines():
        line = json.loads(row)
        if line["event"] == event:
            key = (line["role"], line.get("step", line.get("episode")))
            values[key] = line[VALUE[event]]
        elif line["event"] == "start" and line.get("device") not in (None, "cpu"):
            told.setdefault("devices", []).append(f"{line['role']}={line['device']}")
        elif line["event"] == "error":
            told["error"] = line["message"]
        elif line["event"] == "end":
            if line.get("config", {}).get("lr"):
                told["lr"] = line["config"]["lr"]
            for name in ("device_mem_mb", "samples_per_s", "steps_per_s", "train_s"):
                if line.get(name) is not None:
                    told[name] = line[name]
    told["wall_s"] = round(time.monotonic() - start, 2)
    return values, told


def scaled(difference: float, value: float) -> float:
    return abs(difference) / max(1.0, abs(value))


def tolerances(reference: dict, nudged: dict) -> dict:
    """Returns the allowed differences by role and step, up to the first difference above CHAOS."""
    allowed, furthest = {}, 0.0
    for key in sorted(reference, key=lambda key: key[1]):
        if key not in nudged:
            break
        furthest = max(furthest, scaled(nudged[key] - reference[key], reference[key]))
        if furthest > CHAOS:
            break
        allowed[key] = FLOOR + FACTOR * furthest
    return allowed


def main() -> int:
    binary = sys.argv[1]
    limit_s = float(sys.argv[2]) if len(sys.argv) > 2 else 120
    failures = 0
    with tempfile.TemporaryDirectory() as folder:
        images = pathlib.Path(folder) / "mnist"
        write_images(images)
        for job, (options, event, placements) in JOBS.items():
            if job == "ps":
                options = [*options, "--data", os.fspath(images)]
            on_cpu = [*options, "--device", "cpu"]
            expected, reference = run(binary, job, on_cpu, event, limit_s)
            lr = repr(reference.pop("lr", 0.01) * (1 + NUDGE))
            nudged, _ = run(binary, job, [*on_cpu, "--lr", lr], event, limit_s)
            allowed = tolerances(expected, nudged)
            for placement in placements:
                actual, told = run(binary, job, [*options, *placement], event, limit_s)
                told.pop("lr", None)
                same_steps = bool(allowed) and expected.keys() == actual.keys()
                # The largest allowed value is 1.
                worst = max((scaled(expected[key] - actual[key], expected[key]) / allowed[key]
                             for key in allowed), default=None) if same_steps else None
                good = same_steps and worst <= 1 and "devices" in told
                failures += not good
                print(json.dumps({"event": "job", "job": job, "placement": " ".join(placement),
                                  "ok": good, "values": len(actual), "compared": len(allowed),
                                  "worst": worst, "tolerance": max(allowed.values(), default=None),
                                  "cpu_wall_s": reference["wall_s"], **told}), flush=True)
    return int(failures > 0)


sys.exit(main())
