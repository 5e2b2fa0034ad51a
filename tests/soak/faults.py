"""usage: faults.py DISTRAIN FOLDER: see faults.sh. Prints a line for each injected fault, and a table at the end.

Each trial chooses a job, a fault and a moment from the seed and the trial's number, and runs the job with checkpoints:

  kill, stop     one rank under a launcher gets SIGKILL or SIGSTOP
  cut, reset, stall, short, slow
                 ranks join over TCP, one of them through tests/support/proxy.py: the link is closed, reset, silent,
                 cut within a frame, or slow
  disk           the folder of checkpoints is on a disk that becomes full

Expected: every process ends by itself; no process is left; the error names the rank that was hit, or for a link one of
its two ends; the exit code fits the fault; and a run that resumes from the newest checkpoint ends with exactly the
files of an undisturbed run. A slow link changes nothing.

A moment is defined by the preceding line of the log and the time since that line, so that it also fits a slow machine.
A fault after the end of the job does not count and is repeated at an earlier moment."""

import collections
import glob
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

support = os.path.join(os.path.dirname(__file__), "..", "support")
sys.path.insert(0, support)
from checkpoint_files import newest_checkpoint  # noqa: E402
from free_port import free_port  # noqa: E402

PEER_TIMEOUT = 5  # seconds
HANGS = 90  # seconds after which a job counts as hanging

distrain, folder = sys.argv[1:]
seed = int(os.environ.get("FAULTS_SEED", "1"))
count = int(os.environ.get("FAULTS_COUNT", "100"))
only = os.environ.get("FAULTS_ONLY")
keep = os.environ.get("FAULTS_KEEP")
proxy_program = os.path.join(support, "proxy.py")

JOBS = {  # number of ranks; arguments
    "hybrid": (4, "--mode sync --epochs 60 --checkpoint-every 20"),
    "ps": (4, f"--data {folder}/images --mode sync --trainers 3 --epochs 4 --checkpoint-every 2"),
    "rnn": (3, "--mode sync --trainers 2 --epochs 30 --checkpoint-every 10"),
    "rl": (3, "--observers 2 --max-steps 200 --max-episodes 40 --checkpoint-every 5"),
    "pipeline": (3, "--model resnet50 --image-size 32 --batch-size 4 --micro-batches 2 --batches 4 --checkpoint-every 1"),
}
GOOD = {"rl": (0, 11)}  # exit codes of success; rl may miss its goal
LINKS = ("cut", "reset", "stall", "short", "slow")
FAULTS = ("kill", "kill", "stop", "disk", *LINKS)


def processes():
    """Returns the pids of this test's living processes, by the mark in their environment."""
    mark = ("DISTRAIN_TEST_ID=" + os.environ["DISTRAIN_TEST_ID"]).encode()
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/comm") as comm, open(f"/proc/{pid}/environ", "rb") as environ:
                if comm.read() == "distrain\n" and mark in environ.read().split(b"\0"):
                    found.append(int(pid))
        except OSError:  # the process has just ended
            pass
    return found


def wait_for_none():
    deadline = time.monotonic() + 10
    while processes() and time.monotonic() < deadline:
        time.sleep(0.02)
    return processes()


class Run:
    """A running command: a launcher or a rank."""

    def __init__(self, name, job, arguments, saves):
        self.path = f"{folder}/{name}"
        with open(self.path + ".out", "w") as out, open(self.path + ".err", "w") as err:
            self.process = subprocess.Popen(
                [distrain, job, *JOBS[job][1].split(), "--seed", "5", "--threads", "1", "--peer-timeout",
                 str(PEER_TIMEOUT), "--log-interval", "5", "--keep", "1000", *saves, *arguments],
                stdout=out, stderr=err, stdin=subprocess.DEVNULL)

    def lines(self):
        with open(self.path + ".out") as file:
            text = file.read()
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def pid_of(self, rank, after):
        """Waits until the log has `after` lines and the rank has started; returns None if the job ends before."""
        while True:
            ended = self.process.poll() is not None
            lines = self.lines()
            pids = [line["pid"] for line in lines if line["event"] == "start" and line["rank"] == rank]
            if pids and len(lines) >= after:
                return pids[0]
            if ended:
                return None
            time.sleep(0.002)

    def wait(self, limit=HANGS):
        try:
            return self.process.wait(limit)
        except subprocess.TimeoutExpired:
            return None

    def end(self):
        found = [line for line in self.lines() if line["event"] == "end"]
        return found[-1] if found else None


class Undisturbed:
    def __init__(self, job):
        self.where = f"{folder}/{job}.undisturbed"
        began = time.time()
        run = Run(f"{job}.undisturbed", job, [], ["--checkpoint", self.where])
        self.code = run.wait()
        assert self.code in GOOD.get(job, (0,)), f"{job} by itself: exit code {self.code}: {run.lines()[-1:]}"
        lines = run.lines()
        self.times = sorted(line["ts"] for line in lines)
        self.began, self.over = began, self.times[-1]
        self.roles = {line["rank"]: line["role"] for line in lines if line["event"] == "ready"}
        self.files = newest_checkpoint(self.where)
        steps = sorted(glob.glob(self.where + "/step-*"))
        self.save_bytes = sum(os.path.getsize(f) for f in glob.glob(steps[0] + "/*"))
        self.saves = len(steps)
        print(f"{job}: by itself {self.over - began:.2f} s, exit {self.code}, {self.saves} checkpoints of "
              f"{self.save_bytes} bytes")


def hold(pid):
    """Stops the process; returns False if it has ended. An exiting process does not react to the signal."""
    deadline = time.monotonic() + 10
    try:
        os.kill(pid, signal.SIGSTOP)
        while time.monotonic() < deadline:
            with open(f"/proc/{pid}/stat") as file:
                state = file.read().rpartition(")")[2].split()[0]
            if state in "TZX":
                return state == "T"
            time.sleep(0.0002)
    except OSError:
        pass
    return False


def blames(lines, ranks):
    """Returns problems in the lines of a failed launcher or rank, which must blame one of `ranks`."""
    found = []
    errors = [line for line in lines if line["event"] == "error"]
    if len(errors) != 1:
        found.append(f"{len(errors)} error lines")
    for line in [*errors, *(line for line in lines if line["event"] == "end")]:
        if line.get("cause_rank") not in ranks:
            found.append(f"{line['event']} blames {line.get('cause_rank')}: {line.get('message')}")
    return found


class Trial:
    def __init__(self, number, alone):
        choose = random.Random(f"{seed}.{number}")
        self.job = choose.choice(list(JOBS))
        self.fault = choose.choice(FAULTS)
        if self.fault == "disk" and os.geteuid() != 0:
            self.fault = "kill"
        self.alone = alone[self.job]
        self.rank = choose.randrange(JOBS[self.job][0])
        if self.fault in LINKS:
            self.rank = max(1, self.rank)
        self.at = choose.random()  # the moment as a fraction of the job's time
        self.choose = choose
        self.where = f"{folder}/saves"
        self.saves = ["--checkpoint", self.where]
        self.good = GOOD.get(self.job, (0,))
        self.hit = False
        self.runs, self.breaches = [], []
        self.took = 0.0

    def name(self):
        role = self.alone.roles.get(self.rank, "")
        return f"{self.job:9} {role:17} {self.fault:6} at {self.at:.3f}"

    def clean(self):
        for pid in processes():
            os.kill(pid, signal.SIGKILL)
        for run in self.runs:
            run.process.wait()
        if os.path.ismount(self.where):
            subprocess.run(["umount", "-l", self.where], check=True)
        shutil.rmtree(self.where, ignore_errors=True)

    def run(self):
        while True:
            shutil.rmtree(self.where, ignore_errors=True)
            self.runs, self.breaches = [], []
            {"kill": self.signal, "stop": self.signal, "disk": self.disk}.get(self.fault, self.link)()
            if self.hit or self.breaches or self.at < 0.01:
                break
            self.clean()  # the fault came after the end of the job
            self.at /= 2
        if not self.breaches:
            self.resume()
        left = wait_for_none()
        if left:
            self.breaches.append(f"processes are left: {left}")
        if self.breaches and keep:
            for run in self.runs:
                for kind in ("out", "err"):
                    shutil.copy(f"{run.path}.{kind}", keep)
        self.clean()

    def await_all(self, at):
        """Returns the exit codes; records a breach if a process does not end."""
        codes = [run.wait() for run in self.runs]
        self.took = time.time() - at
        if None in codes:
            self.breaches.append(f"hangs: {[i for i, code in enumerate(codes) if code is None]}")
        return codes

    def signal(self):
        run = Run("trial", self.job, [], self.saves)
        self.runs = [run]
        moment = self.alone.began + (self.alone.over - self.alone.began) * self.at
        after = sum(1 for t in self.alone.times if t <= moment)
        since = moment - (self.alone.times[after - 1] if after else self.alone.began)
        pid = run.pid_of(self.rank, after)
        time.sleep(since)
        at = time.time()
        if pid and hold(pid):
            self.hit = True
            if self.fault == "kill":
                os.kill(pid, signal.SIGKILL)
        codes = self.await_all(at)
        if None in codes or not self.hit:
            return
        lines = run.lines()
        before = [line for line in lines if line["ts"] <= at]
        ending = any(line["event"] in ("rank_end", "end") for line in before)
        if codes[0] in self.good and (ending or not any(l["event"] == "error" for l in lines)):
            if not ending:
                self.breaches.append("the job ends well without the rank")
            return
        if codes[0] != (137 if self.fault == "kill" else 5):
            self.breaches.append(f"exit code {codes[0]}")
        self.breaches += blames(lines, [self.rank])

    def link(self):
        port, ranks = free_port(), JOBS[self.job][0]
        kind = self.fault
        if kind == "slow":
            faults = [self.choose.choice(["*/both/delay=0.01", "*/both/rate=4000000", "*/both/piece=700"])]
        else:
            way = self.choose.choice(["up", "down", "both"] if kind == "stall" else ["up", "down"])
            place = f"{4 + int(self.at * 100)}.{self.choose.randrange(1, 48)}" if kind == "short" else (
                f"{4 + int(self.at * 100)}.0")
            faults = [f"{c}/{way}/{'cut' if kind == 'short' else kind}={place}" for c in (1, 2)]
        proxy = subprocess.Popen([sys.executable, proxy_program, str(port), *faults], stdout=subprocess.PIPE,
                                 stderr=subprocess.PIPE, text=True)
        through = proxy.stdout.readline().strip()
        for rank in range(ranks):
            arguments = ["--rank", str(rank), "--transport", "tcp", "--join-timeout", "60", "--master-port",
                         through if rank == self.rank else str(port)]
            # Rank 0 sends the folder to the other ranks.
            self.runs.append(Run(f"trial.{rank}", self.job, arguments, self.saves if rank == 0 else []))
        codes = self.await_all(time.time())
        proxy.kill()
        hits = [line for line in proxy.communicate()[0].splitlines() if line.startswith("hit")]
        self.hit = kind == "slow" or bool(hits)
        if None in codes or not self.hit:
            return
        if kind == "slow" or all(code in self.good for code in codes):
            if any(code not in self.good for code in codes):
                self.breaches.append(f"exit codes {codes}: {[run.end() for run in self.runs]}")
            return
        self.took = time.time() - float(hits[0].split()[2])
        for rank, (run, code) in enumerate(zip(self.runs, codes)):
            if code not in (3, 4, 5, *self.good):
                self.breaches.append(f"rank {rank}: exit code {code}")
            if code not in self.good:
                self.breaches += [f"rank {rank}: {b}" for b in blames(run.lines(), [0, self.rank, None if code != 5 else 0])]

    def disk(self):
        self.rank = 0
        fit = self.at * (self.alone.saves + 0.5)
        size = max(int(self.alone.save_bytes * fit), 1 << 14)
        os.makedirs(self.where)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", self.where], check=True)
        self.runs = [Run("trial", self.job, [], self.saves)]
        codes = self.await_all(time.time())
        if None in codes:
            return
        self.hit = codes[0] not in self.good
        if self.hit:
            if codes[0] != 9:
                self.breaches.append(f"exit code {codes[0]}: {self.runs[0].end()}")
            self.breaches += blames(self.runs[0].lines(), [0])
            subprocess.run(["mount", "-o", "remount,size=4g", self.where], check=True)

    def resume(self):
        """Resumes the job and compares its last checkpoint with that of an undisturbed run."""
        run = Run("resumed", self.job, ["--resume", "auto"], self.saves)
        self.runs.append(run)
        code = run.wait()
        if code not in self.good:
            self.breaches.append("hangs when it resumes" if code is None else f"resumed: exit code {code}: {run.end()}")
        elif newest_checkpoint(self.where) != self.alone.files:
            step, files = newest_checkpoint(self.where)
            self.breaches.append(f"resumed: {step} differs in "
                                 f"{[f for f in files if files[f] != self.alone.files[1].get(f)]}")


def main():
    alone = {job: Undisturbed(job) for job in JOBS}
    table, bad = collections.defaultdict(list), 0
    print(f"FAULTS_SEED={seed}")
    for number in [int(only)] if only else range(count):
        trial = Trial(number, alone)
        trial.run()
        bad += bool(trial.breaches)
        table[trial.job, trial.fault].append((trial.took, trial.breaches, trial.hit))
        print(f"{number:5} {trial.name()}  {trial.took:5.2f} s  exit {[r.process.returncode for r in trial.runs]}  "
              f"{'; '.join(trial.breaches) or ('ok' if trial.hit else 'not hit')}")
    print(f"\n{'job':9} {'fault':6} injected  ends after, at most  breaches")
    for (job, fault), results in sorted(table.items()):
        print(f"{job:9} {fault:6} {sum(r[2] for r in results):8}  {max(r[0] for r in results):17.2f} s  "
              f"{sum(bool(r[1]) for r in results):8}")
    print(f"{sum(r[2] for results in table.values() for r in results)} faults injected, {bad} with a breach")
    return bad


sys.exit(1 if main() else 0)
