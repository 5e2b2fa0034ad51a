"""Trains a ResNet50 in two stages that share a GPU, and in one process on the same GPU.

usage: compare_pipeline.py DISTRAIN [OPTION...]     appends the options to those of both runs

Prints a JSON line for each run and number of micro-batches. Then prints the ratio of the runs' highest samples per
second, and the wanted ratio. Exits with 1 if a run fails.
"""

import json
import subprocess
import sys

WANTED = 0.9
LIMIT_S = 150
OPTIONS = ["--device", "cuda:0", "--micro-batches", "1,2,4,8", "--batches", "8"]


def speeds(binary: str, impl: str, options: list[str]) -> dict[int, float]:
    """Runs the job. Returns the samples per second by number of micro-batches, or {} if it fails."""
    try:
        done = subprocess.run([binary, "pipeline", *options], capture_output=True, text=True,
                              check=False, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        print(json.dumps({"event": "pipeline", "impl": impl, "error": f"no end after {LIMIT_S} s"}),
              flush=True)
        return {}
    found = {}
    for line in map(json.loads, done.stdout.splitlines()):
        if line["event"] == "split":
            found[line["num_split"]] = line["samples_per_s"]
            print(json.dumps({"event": "pipeline", "impl": impl, "num_split": line["num_split"],
                              "batch_s": line["batch_s"],
                              "samples_per_s": line["samples_per_s"]}), flush=True)
    if done.returncode != 0:
        print(json.dumps({"event": "pipeline", "impl": impl, "exit_code": done.returncode,
                          "error": done.stderr.strip()}), flush=True)
        return {}
    return found


def main() -> int:
    binary, *more = sys.argv[1:]
    one = speeds(binary, "one process", [*OPTIONS, *more, "--local"])
    two = speeds(binary, "two stages", [*OPTIONS, *more, "--stages", "2"])
    if not one or not two:
        return 1
    ratio = max(two.values()) / max(one.values())
    print(json.dumps({"event": "ratio", "name": "pipeline-gpu", "impl": "two stages",
                      "of": "one process", "num_split": max(two, key=two.get),
                      "speed": round(ratio, 3), "wanted": WANTED}), flush=True)
    return 0


sys.exit(main())
