"""usage: losses.py DISTRAIN FOLDER MODE STARTER [PORT]: see losses.sh.

Runs `distrain ps` once undisturbed and once while LOSSES trainers are killed, at equal distances in steps (or every
LOSSES_EVERY seconds). The launcher restarts them (--max-restarts). If each rank was started by itself, this script
restarts them with the same --rank or with --rank auto. With one server every step must be made exactly once, and
nothing of the lost trainers may remain."""

import json
import os
import random
import signal
import subprocess
import sys
import time

distrain, folder, mode, starter, *port = sys.argv[1:]
losses = int(os.environ.get("LOSSES", "4"))
every = float(os.environ.get("LOSSES_EVERY", "0"))
epochs = int(os.environ.get("LOSSES_EPOCHS", "6"))
longest = float(os.environ.get("LOSSES_LONGEST", "150"))  # seconds for one run
choose = random.Random(int(os.environ.get("LOSSES_SEED", "1")))
TRAINERS, BATCH = 4, int(os.environ.get("LOSSES_BATCH", "16"))
STEPS_PER_EPOCH = int(os.environ["LOSSES_IMAGES"]) // TRAINERS // BATCH
STEPS = epochs * STEPS_PER_EPOCH * TRAINERS


class Process:
    """A launcher, or a rank that was started by itself."""

    started = 0

    def __init__(self, name, arguments):
        Process.started += 1
        self.path = f"{folder}/{mode}.{starter}.{name}.{Process.started}.json"
        with open(self.path, "w") as out, open(self.path + ".err", "w") as err:
            self.process = subprocess.Popen([distrain, "ps", *arguments], stdout=out, stderr=err,
                                            stdin=subprocess.DEVNULL)

    def lines(self):
        with open(self.path) as file:
            text = file.read()
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


class Job:
    def __init__(self, name):
        arguments = ["--data", f"{folder}/images", "--mode", mode, "--trainers", str(TRAINERS), "--batch-size",
                     str(BATCH), "--epochs", str(epochs), "--seed", "5", "--peer-timeout", "60", "--log-interval", "1",
                     "--threads", "1", *os.environ.get("LOSSES_ARGUMENTS", "").split()]
        self.trainers = []  # living trainers that this script started
        if starter == "launcher":
            again = ["--max-restarts", "1000", "--checkpoint", f"{folder}/{mode}.{name}"]
            self.first = Process(name, arguments + again)
        else:
            self.told = ["--master-port", port[0], "--join-timeout", "60"]
            self.first = Process(name, [*arguments, *self.told, "--rank", "0"])
        self.all = [self.first]
        if starter != "launcher":
            for rank in range(1, TRAINERS + 1):
                self.start(name, rank)

    def start(self, name, rank):
        self.trainers.append(Process(name, [*self.told, "--rank", str(rank)]))
        self.all.append(self.trainers[-1])

    def lines(self):
        return [line for each in self.all for line in each.lines()]

    def runs(self):
        return self.first.process.poll() is None

    def living(self):
        """Returns the living trainers that have made a step: a map from rank to pid and Process."""
        living = {}
        for each in self.all:
            if each.process.poll() is not None:
                continue
            started = {}
            for line in each.lines():
                if line["event"] == "start":
                    started[line["rank"]] = line["pid"]
                elif line["event"] == "step":  # with --rank auto the rank is known by now
                    living[line["rank"]] = started.get(line["rank"]) or started[None], each
        return {rank: (pid, each) for rank, (pid, each) in living.items()
                if rank != 0 and os.path.exists(f"/proc/{pid}")}

    def server(self):
        return next(line["pid"] for line in self.lines() if line["event"] == "start" and line["rank"] == 0)

    def lose_one(self, name):
        # At least one trainer must survive, because the job ends with the last one.
        living = self.living()
        if len(living) < 2:
            return False
        rank = choose.choice(sorted(living))
        pid, each = living[rank]
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
        if starter != "launcher":
            each.process.wait()
            self.trainers.remove(each)
            self.start(name, choose.choice([rank, "auto"]))
        return True

    def start_who_came_late(self, name):
        """Restarts trainers whose rank was taken: after two losses --rank auto may get a rank that another names."""
        for each in list(self.trainers):
            if each.process.poll() == 3:
                self.trainers.remove(each)
                self.start(name, "auto")

    def wait(self, name):
        limit = time.time() + longest
        for each in [self.first, *self.trainers]:
            try:
                code = each.process.wait(max(1, limit - time.time()))
            except subprocess.TimeoutExpired:
                sys.exit(f"{name}: still there after {longest} s: {each.lines()[-3:]}")
            # A trainer that was started while the job ended finds no job.
            if code != 0 and not (code == 3 and each in self.trainers):
                sys.exit(f"{name}: exit code {code}: {each.lines()[-1]}")
        return self.first.lines()[-1]


def resident(pid):
    """Returns a list with the resident memory in MB; empty if the process has ended."""
    try:
        with open(f"/proc/{pid}/status") as file:
            return [int(line.split()[1]) // 1024 for line in file if line.startswith("VmRSS")]
    except FileNotFoundError:
        return []


def expect(holds, what):
    if not holds:
        sys.exit(f"{mode}, {starter}: {what}")


undisturbed = Job("undisturbed").wait("undisturbed")
job = Job("disturbed")
killed, next_at, begun, memory = 0, STEPS // (losses + 2), time.time(), []
while job.runs() and killed < losses and time.time() - begun < longest:
    time.sleep(0.02)
    job.start_who_came_late("disturbed")
    lines = job.lines()
    stepped = [line["rank"] for line in lines if line["event"] == "step"]
    told = sum(line["event"] == "lost" for line in lines)
    due = time.time() - begun >= every * (killed + 1) if every else len(stepped) >= next_at
    # Before all trainers have begun, a loss ends the job. Wait for the `lost` line before the next loss.
    if due and len(set(stepped)) == TRAINERS and told == killed and job.lose_one("disturbed"):
        killed += 1
        next_at = len(stepped) + STEPS // (losses + 2)
        memory += resident(job.server())
end = job.wait("disturbed")
lines = job.lines()
lost = [line for line in lines if line["event"] == "lost"]
returned = [line for line in lines if line["event"] == "returned"]
print(f"{mode}, {starter}: {killed} killed, {len(lost)} lost, {len(returned)} returned, {STEPS} steps, "
      f"{sum(line['steps_back'] for line in lost)} given back, {end['updates']} updates, accuracy {end['accuracy']:.3f}, "
      f"undisturbed {undisturbed['accuracy']:.3f}, server {memory} MB", flush=True)
expect(killed == losses, f"{killed} killed, not {losses}: the job is too short")
expect(len(lost) == killed and end["lost"] == killed, "not as many lost lines as were killed")
expect(lost and all(line["steps_in_doubt"] == 0 and line["kind"] == "peer_lost" for line in lost), "a lost line in doubt")
# Each killed trainer had made a step, so it had been admitted, at the start or as a replacement.
there = {line["rank"] for line in lines
         if line["event"] in ("end", "rank_end") and line["rank"] and line["exit_code"] == 0 and line["steps"] > 0}
expect(len(returned) >= killed + len(there) - TRAINERS > 0, "not all came back")
expect(end["updates"] == STEPS, "not every step was made exactly once")
expect(end["live_rrefs"] == 0 and end["live_contexts"] == 0, "something is left of those who are gone")
if os.environ.get("LOSSES_TRAINED"):  # the job is long enough to compare accuracies
    expect(abs(end["accuracy"] - undisturbed["accuracy"]) <= 0.02, "another accuracy")
if starter == "launcher":
    expect(end["steps"] == STEPS and end["restarts"] == killed, "other steps or restarts in the last line")
if len(memory) >= 30:  # compare after the first losses, which allocate memory for threads
    expect(memory[-1] - memory[9] <= 16, "the server grows with each loss")
