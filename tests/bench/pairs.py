"""usage: pairs.py OLD NEW FOLDER [PAIRS] [NAME...]: compares two builds by runs in pairs.

OLD and NEW are folders with `distrain` and `bench_echo` (build/release/bin); FOLDER has `clicks.train` (fastText's
format) and `images` (MNIST's files). For each figure the two builds run alternately, PAIRS times (20); the one that
runs first changes from pair to pair. Prints the median of the ratios new/old of the times, and the 95 % interval of
that median by a bootstrap (10,000 resamples, fixed seed). Rates are inverted, so below 1 is faster."""

import json
import random
import statistics
import subprocess
import sys

old, new, folder = sys.argv[1:4]
pairs = int(sys.argv[4]) if len(sys.argv) > 4 else 20
names = sys.argv[5:]


def lines(command):
    out = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False).stdout
    return [json.loads(line) for line in out.decode().splitlines()]


def echo(transport):
    def measure(where):
        found = [line["p50_us"] for line in lines([f"{where}/bench_echo", "--pin", "--bytes", "4", "--iterations", "4000",
                                                   "--impl", f"distrain-{transport}"]) if line["event"] == "bench"]
        return found[0]
    return measure


def job(*arguments):
    def measure(where):
        end = lines([f"{where}/distrain", *arguments])[-1]
        if end["status"] != "ok":
            sys.exit(f"{where}: {end}")
        return 1 / end["steps_per_s"]
    return measure


FIGURES = {
    "echo unix": echo("unix"),
    "echo tcp": echo("tcp"),
    "hybrid": job("hybrid", "--epochs", "400", "--threads", "1"),
    "ps": job("ps", "--data", f"{folder}/images", "--epochs", "2", "--threads", "1"),
    "clicks": job("hybrid", "--data", f"{folder}/clicks.train", "--trainers", "1", "--embedding-dim", "32", "--batch-size",
                  "256", "--optimizer", "adagrad", "--epochs", "1", "--threads", "1"),
}


def interval(ratios):
    choose = random.Random(1)
    medians = sorted(statistics.median(choose.choices(ratios, k=len(ratios))) for _ in range(10000))
    return medians[250], medians[9749]


for name, measure in FIGURES.items():
    if names and name.split()[0] not in names:
        continue
    ratios, times = [], ([], [])
    for pair in range(pairs):
        for side in (0, 1) if pair % 2 == 0 else (1, 0):
            times[side].append(measure((old, new)[side]))
        ratios.append(times[1][-1] / times[0][-1])
    low, high = interval(ratios)
    print(json.dumps({"event": "pairs", "name": name, "pairs": pairs, "ratio": round(statistics.median(ratios), 3),
                      "low": round(low, 3), "high": round(high, 3), "old": round(statistics.median(times[0]), 9),
                      "new": round(statistics.median(times[1]), 9)}), flush=True)
