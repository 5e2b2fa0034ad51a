#!/usr/bin/env python3
"""Checks the verdicts of cases.tsv and complaints.tsv, and the counts in docs/from-pytorch.md.

usage: check.py BUILD [LOG...]

BUILD is the build folder of the asan preset. Without a LOG, checks that all test cases that are named exist. With
LOGs, which ctest writes to Testing/Temporary/LastTest.log, checks that these test cases ran and passed.
"""
import collections
import os
import re
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
TESTS = os.path.dirname(HERE)
# The number of cases in each file of PyTorch's tests.
FILES = {
    "rpc_test": 342,
    "faulty_agent_rpc_test": 20,
    "dist_autograd_test": 102,
    "dist_optimizer_test": 4,
    "remote_module_test": 20,
    "parameter_server_test": 1,
    "reinforcement_learning_rpc_test": 1,
    "ddp_under_dist_autograd_test": 9,
    "distributed_test": 80,
}
DDP = ("ddp_under_dist_autograd_test", "distributed_test")
VERDICTS = ("same", "differs", "missing", "cuda", "python")
OUTCOMES = ("better", "same", "worse")
LEAST_COMPLAINTS = 40

problems = []


def problem(text):
    problems.append(text)


def read(name, header):
    rows = []
    with open(os.path.join(HERE, name), encoding="utf-8") as file:
        lines = file.read().split("\n")
    if lines[0].split("\t") != header:
        problem(f"{name}: the first line is not the header: {' '.join(header)}")
    if lines[-1] != "":
        problem(f"{name}: the last line does not end")
    for number, line in enumerate(lines[1:-1], 2):
        fields = line.split("\t")
        if len(fields) != len(header) or any(field != field.strip() for field in fields):
            problem(f"{name}:{number}: not {len(header)} fields without blanks around them")
            continue
        rows.append((f"{name}:{number}", dict(zip(header, fields))))
    return rows


def catch_names(program):
    """Returns the names of the test cases of a Catch2 program."""
    for option in (["--list-test-names-only"], ["--list-tests", "--verbosity", "quiet"]):  # Catch2 2 and 3
        done = subprocess.run([program] + option, capture_output=True, text=True)
        names = {line.strip() for line in done.stdout.split("\n") if line.strip()}
        if names and not done.stderr.strip():
            return names
    problem(f"{program} lists no test cases: {done.stderr.strip()}")
    return set()


def source_has(program, case):
    """Returns true if a source of `program`, which another preset builds, has the test case."""
    for folder, _, files in os.walk(os.path.join(TESTS, program)):
        for name in files:
            with open(os.path.join(folder, name), encoding="utf-8", errors="replace") as file:
                if name.endswith(".cpp") and f'"{case}"' in file.read():
                    return True
    return False


def script_exists(test):
    """Returns true if a script is the CTest test `test`: cli.usage, or cli.trained.rl for a case."""
    folder, name, *case = test.split(".")
    path = os.path.join(TESTS, folder, name + ".sh")
    if not os.path.exists(path):
        return False
    with open(path, encoding="utf-8") as file:
        cases = re.findall(r"^case_([a-z0-9_]+)\(\)", file.read(), re.M)
    return cases == [] if not case else case[0] in cases


def passed_in(log):
    """Returns what passed according to a log of ctest: (program, case) pairs, and names of CTest tests."""
    passed = set()
    with open(log, encoding="utf-8", errors="replace") as file:
        sections = re.split(r"^\d+/\d+ Testing: ", file.read(), flags=re.M)[1:]
    for section in sections:
        if not re.search(r"^Test Passed\.$", section, re.M):
            continue
        test = section.split("\n", 1)[0].strip()
        passed.add(test)
        for case in re.findall(r"^\d+\.\d+ s: (.*)$", section, re.M):
            passed.add((test.split(".")[0], case.strip()))
    return passed


def check_test(where, test, build, logs, cache={}):
    """Checks a field `test`: <program>:<case>, or the name of a CTest test that runs a script."""
    program, colon, case = test.partition(":")
    if logs:
        if "passed" not in cache:
            cache["passed"] = set().union(*(passed_in(log) for log in logs))
        if ((program, case) if colon else program) not in cache["passed"]:
            problem(f"{where}: '{test}' has not passed in this run")
        return
    if not colon:
        if not script_exists(test):
            problem(f"{where}: no script is the test '{test}'")
        return
    if program not in cache:
        path = os.path.join(build, "bin", program)
        cache[program] = catch_names(path) if os.path.exists(path) else None
    names = cache[program]
    if not (source_has(program, case) if names is None else case in names):
        problem(f"{where}: {program} has no test case '{case}'")


def check_cases(build, logs):
    rows = read("cases.tsv", ["file", "class", "case", "verdict", "test", "why"])
    seen = set()
    counts = {file: collections.Counter() for file in FILES}
    for where, row in rows:
        key = (row["file"], row["class"], row["case"])
        if key in seen:
            problem(f"{where}: {' '.join(key)} is there twice")
        seen.add(key)
        if row["file"] not in FILES or row["verdict"] not in VERDICTS:
            problem(f"{where}: unknown file or verdict")
            continue
        counts[row["file"]][row["verdict"]] += 1
        if row["verdict"] == "same" and not row["test"]:
            problem(f"{where}: 'same' names no test")
        if row["verdict"] != "same" and not row["why"] and not (row["verdict"] == "cuda" and row["test"]):
            problem(f"{where}: '{row['verdict']}' gives no reason")
        if row["test"]:
            check_test(where, row["test"], build, logs)
    for file, number in FILES.items():
        if sum(counts[file].values()) != number:
            problem(f"cases.tsv: {file} has {sum(counts[file].values())} cases, not {number}")
    return counts


def share(counts, files):
    """Returns the share of `same` among the cases that are neither for GPUs nor for Python."""
    total = sum(counts[f][v] for f in files for v in ("same", "differs", "missing"))
    same = sum(counts[f]["same"] for f in files)
    return same, total, f"{100 * same / max(total, 1):.1f} %"


def check_complaints(build, logs):
    rows = read("complaints.tsv", ["project", "issue", "complaint", "verdict", "test", "note"])
    outcomes = collections.Counter()
    for where, row in rows:
        outcomes[row["verdict"]] += 1
        if row["verdict"] not in OUTCOMES or not all(row[f] for f in ("project", "complaint", "test")):
            problem(f"{where}: a field is missing, or the verdict is unknown")
        elif not row["test"].startswith("$ "):  # a command, whose outcome `note` has
            check_test(where, row["test"], build, logs)
        elif not row["note"]:
            problem(f"{where}: the outcome of the command is missing")
    if len(rows) < LEAST_COMPLAINTS:
        problem(f"complaints.tsv: {len(rows)} complaints are fewer than {LEAST_COMPLAINTS}")
    return outcomes


def table_of(counts, outcomes):
    """Returns the lines of the tables that docs/from-pytorch.md must have."""
    lines = ["| file | " + " | ".join(VERDICTS) + " |", "|---" * (1 + len(VERDICTS)) + "|"]
    for file in FILES:
        lines.append(f"| `{file}` | " + " | ".join(str(counts[file][v]) for v in VERDICTS) + " |")
    total = [sum(counts[file][v] for file in FILES) for v in VERDICTS]
    lines.append("| all | " + " | ".join(map(str, total)) + " |")
    lines.append("")
    lines.append(" · ".join(f"complaints {o}: {outcomes[o]}" for o in OUTCOMES))
    return lines


def main():
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    build, logs = sys.argv[1], sys.argv[2:]
    counts = check_cases(build, logs)
    outcomes = check_complaints(build, logs)
    table = table_of(counts, outcomes)
    print("\n".join(table))
    rpc = [file for file in FILES if file not in DDP]
    for name, files in (("RPC, autograd, optimizer, RemoteModule", rpc), ("DDP", DDP)):
        same, total, percent = share(counts, files)
        print(f"{name}: {same} of {total} cases that need neither a GPU nor Python are the same: {percent}")
    with open(os.path.join(os.path.dirname(TESTS), "docs", "from-pytorch.md"), encoding="utf-8") as file:
        page = file.read().split("\n")
    for line in table:
        if line not in page:
            problem(f"docs/from-pytorch.md lacks the line: {line}")
    for text in problems:
        print(text, file=sys.stderr)
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
