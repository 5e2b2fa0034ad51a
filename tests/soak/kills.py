"""usage: kills.py DISTRAIN FOLDER: see kills.sh. Prints a line for each run, and a table at the end.

Of the moments of one rank and signal the first lies before all ranks are there, the last one while they end,
the others between. A moment is told by the line of the log that it comes after, and the time since: so it is
the same on a slow day. What is expected: the job ends; survivors of a kill within 1 s of it,
of a stop within the peer timeout and 1 s; one `error` line, of the launcher or of a rank, which names the
rank; the launcher's exit code is 137 after a kill and 5 after a stop; no process is left. A rank that had said its end before is no loss: then
the job may end well."""

import json
import os
import random
import signal
import subprocess
import sys
import time

PEER_TIMEOUT = 5  # seconds, the default
SLACK = 1  # seconds that survivors have beyond
HANGS = 40  # seconds after which we end it ourselves
MOMENTS = 5

distrain, folder = sys.argv[1:]
seed = int(os.environ.get("KILLS_SEED", "1"))
only = os.environ.get("KILLS_ONLY", "").split(":")

JOBS = {
    "hybrid": "--epochs 80",
    "ps": f"--data {folder}/images --mode sync --epochs 6",
    "rnn": "--trainers 2 --epochs 40",
    "rl": "--observers 2 --max-steps 200 --max-episodes 60",
    "pipeline": "--model resnet50 --image-size 96 --batch-size 24 --micro-batches 2 --batches 3",
}


def processes():
    """Living ones of this test, by the mark in their environment."""
    mark = ("DISTRAIN_TEST_ID=" + os.environ["DISTRAIN_TEST_ID"]).encode()
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/comm") as comm, open(f"/proc/{pid}/environ", "rb") as environ:
                if comm.read() == "distrain\n" and mark in environ.read().split(b"\0"):
                    found.append(int(pid))
        except OSError:  # it has just ended
            pass
    return found


class Run:
    def __init__(self, job):
        self.out, self.err = open(f"{folder}/out", "w+"), open(f"{folder}/err", "w+")
        self.began = time.time()
        self.process = subprocess.Popen(
            [distrain, job, *JOBS[job].split(), "--peer-timeout", str(PEER_TIMEOUT)], stdout=self.out,
            stderr=self.err, stdin=subprocess.DEVNULL)

    def lines(self):
        with open(f"{folder}/out") as file:
            text = file.read()
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def children(self):
        """The ranks in their order, as the launcher forks them; before they say anything."""
        pid = self.process.pid
        try:
            with open(f"/proc/{pid}/task/{pid}/children") as file:
                return [int(child) for child in file.read().split()]
        except OSError:
            return []

    def pid_of(self, rank, after):
        """Once all have said `after` lines; None if the job ends before."""
        pid, count = None, 0
        with open(f"{folder}/out") as file:
            while pid is None or count < after:
                count += file.read().count("\n")
                if pid is None and len(self.children()) > rank:
                    pid = self.children()[rank]
                elif self.process.poll() is not None:
                    return None
                else:
                    time.sleep(0.002)
        return pid

    def wait(self):
        """Whether it ends by itself."""
        try:
            self.process.wait(HANGS)
            return True
        except subprocess.TimeoutExpired:
            return False
        finally:
            self.ended = time.time()

    def clean(self):
        for pid in processes():
            os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self.out.close()
        self.err.close()


def phase_of(lines, at, rank, ranks):
    before = [line for line in lines if line["ts"] <= at]
    if any(l["event"] == "rank_end" and l["rank"] == rank for l in before):
        return "ended"
    if any(l["event"] in ("rank_end", "end") for l in before):
        return "ending"
    if len([l for l in before if l["event"] == "ready"]) < len(ranks):
        return "meeting"
    return "at work"


def breaches_of(lines, rank, phase, code, sent, good_code):
    end = lines[-1] if lines and lines[-1]["event"] == "end" else None
    found = []
    if end is None:
        return ["no end"]
    if phase == "ended" and code == good_code:
        return []
    if phase == "ending" and code == good_code and not any(l["event"] == "error" for l in lines):
        return ["the job ends well without it"]
    if phase == "ending" and code == good_code and all(
            l["kind"] == "goal_not_reached" for l in lines if l["event"] == "error"):
        return []  # rl had missed its goal, and said so, before it ended without that rank
    wanted = (137,) if sent == signal.SIGKILL else (5,)
    if code not in wanted:
        found.append(f"exit code {code}")
    errors = [line for line in lines if line["event"] == "error"]
    if len(errors) != 1:
        found.append(f"{len(errors)} error lines")
    for line in errors:
        if line.get("cause_rank") != rank:
            found.append(f"error of rank {line['rank']} blames {line.get('cause_rank')}: {line['message']}")
    if end.get("cause_rank") != rank:
        found.append(f"end blames {end.get('cause_rank')}: {end.get('message')}")
    with open(f"{folder}/err") as file:
        told = [line for line in file.read().splitlines() if line.startswith("distrain: ")]
    if len(told) != 1:
        found.append(f"{len(told)} lines on stderr: {told}")
    return found


def survivors_took(lines, rank, at):
    ends = [line["ts"] - at for line in lines if line["event"] == "rank_end" and line["rank"] != rank]
    return max([0.0, *ends])


class Measured:
    """How the job goes by itself."""

    def __init__(self, job):
        run = Run(job)
        while not run.children():
            time.sleep(0.001)
        self.begins = time.time()
        assert run.wait(), f"{job} does not end by itself"
        lines = run.lines()
        run.clean()
        self.code = run.process.returncode
        self.ranks = {line["rank"]: line["role"] for line in lines if line["event"] == "ready"}
        self.times = sorted(line["ts"] for line in lines)
        self.met = max(line["ts"] for line in lines if line["event"] == "ready")
        self.ends = min(line["ts"] for line in lines if line["event"] == "rank_end") - 0.05
        self.over = run.ended

    def moments(self, choose):
        """As (lines, seconds since the last of them, name)."""
        between = [self.met + (self.ends - self.met) * i / (MOMENTS - 2) for i in range(MOMENTS - 1)]
        bounds = [self.begins, *between, self.over]
        for begin, end in zip(bounds, bounds[1:]):
            at = begin + (end - begin) * choose.random()
            lines = sum(1 for time in self.times if time <= at)
            yield lines, at - (self.times[lines - 1] if lines else self.begins), at - self.begins


def trial(job, rank, ranks, sent, moment, good_code):
    after, since, name = moment
    run = Run(job)
    pid = run.pid_of(rank, after)
    time.sleep(since)
    at = time.time()
    had_ended = not hold(pid)
    if not had_ended and sent != signal.SIGSTOP:
        os.kill(pid, sent)
    hangs = not run.wait()
    lines = run.lines()
    took = run.ended - at
    left = [] if hangs else wait_for_none()
    if had_ended and not hangs:
        run.clean()
        return None
    phase = phase_of(lines, at, rank, ranks)
    breaches = ["hangs"] if hangs else breaches_of(lines, rank, phase, run.process.returncode, sent, good_code)
    limit = SLACK + (PEER_TIMEOUT if sent == signal.SIGSTOP else 0)
    survivors = survivors_took(lines, rank, at)
    if run.process.returncode != good_code and not hangs:
        if survivors > limit:
            breaches.append(f"survivors end after {survivors:.2f} s")
        if took > limit + SLACK:
            breaches.append(f"the launcher ends after {took:.2f} s")
    if left:
        breaches.append(f"processes are left: {left}")
    with open(f"{folder}/out") as file, open(f"{folder}/err") as errors:
        if breaches:
            kept = f"{job}-{rank}-{sent.name}-{name:.3f}"
            keep = os.environ.get("KILLS_KEEP")
            if keep:
                with open(f"{keep}/{kept}", "w") as copy:
                    copy.write(file.read() + errors.read())
    run.clean()
    print(f"{job:9} {ranks[rank]:17} {sent.name}  at {name:5.2f} s ({phase:7})  survivors {survivors:5.2f} s  launcher "
          f"{took:5.2f} s  exit {run.process.returncode:3}  {'; '.join(breaches) or 'ok'}")
    return phase, survivors, took, breaches


def hold(pid):
    """Stops it; false if it has ended. A process that is about to exit takes no signal any more."""
    deadline = time.monotonic() + 10
    try:
        os.kill(pid, signal.SIGSTOP)
        while time.monotonic() < deadline:
            with open(f"/proc/{pid}/stat") as file:
                state = file.read().rpartition(")")[2].split()[0]
            if state in "TZX":
                return state == "T"
            time.sleep(0.0002)
    except (OSError, TypeError):
        pass
    return False


def wait_for_none():
    for _ in range(20):
        if not processes():
            return []
        time.sleep(0.05)
    return processes()


def main():
    choose = random.Random(seed)
    table, all_breaches = [], 0
    print(f"KILLS_SEED={seed}")
    for job in JOBS:
        if only[0] and job != only[0]:
            continue
        measured = Measured(job)
        print(f"{job}: by itself {measured.over - measured.begins:.2f} s, meets in "
              f"{measured.met - measured.begins:.2f} s, exit {measured.code}")
        for rank, role in sorted(measured.ranks.items()):
            for sent in (signal.SIGKILL, signal.SIGSTOP):
                moments = list(measured.moments(choose))
                if (len(only) > 1 and only[1] != str(rank)) or (len(only) > 2 and only[2] != sent.name):
                    continue
                results = []
                for after, since, name in moments:
                    for _ in range(20):
                        result = trial(job, rank, measured.ranks, sent, (after, since, name), measured.code)
                        if result:
                            results.append(result)
                            break
                        after, since = max(0, after - 1), 0  # too late
                survivors, took = [r[1] for r in results], [r[2] for r in results]
                bad = sum(1 for r in results if r[3])
                all_breaches += bad
                if results:
                    table.append((job, role, sent.name, len(results), max(survivors), max(took), bad))
    print(f"\n{'job':9} {'role':17} {'signal':7} runs  survivors, at most  launcher, at most  breaches")
    for job, role, name, runs, survivors, took, bad in table:
        print(f"{job:9} {role:17} {name:7} {runs:4}  {survivors:16.2f} s  {took:15.2f} s  {bad:8}")
    return all_breaches


sys.exit(1 if main() else 0)
