"""usage: losses.py DISTRAIN FOLDER MODE STARTER [PORT]: see losses.sh.

Runs `distrain ps` once undisturbed and once while trainers are killed, LOSSES times, each time that the job has come
so much further (or every LOSSES_EVERY seconds). Somebody starts them again: the launcher (--max-restarts), or this
script, by the same --rank or by --rank auto, where each rank was started by itself. With one server every step is to
be made exactly once, and nothing may be left of those who are gone."""

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
longest = float(os.environ.get("LOSSES_LONGEST", "150"))  # of one run
choose = random.Random(int(os.environ.get("LOSSES_SEED", "1")))
TRAINERS, BATCH = 4, 16
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
        if starter == "launcher":
            again = ["--max-restarts", "1000", "--checkpoint", f"{folder}/{mode}.{name}"]
            self.processes = {None: Process(name, arguments + again)}
        else:
            address = ["--master-port", port[0], "--join-timeout", "60"]
            self.processes = {0: Process(name, [*arguments, *address, "--rank", "0"])}
            self.told = address
            for rank in range(1, TRAINERS + 1):
                self.processes[rank] = Process(name, [*address, "--rank", str(rank)])
        self.all = list(self.processes.values())

    def lines(self):
        return [line for each in self.all for line in each.lines()]

    def runs(self):
        return self.processes[None if starter == "launcher" else 0].process.poll() is None

    def living(self):
        """Trainers that are in the job, by rank."""
        pids = {}
        for each in self.all:  # the later ones have the places of those before
            started = {}
            for line in each.lines():
                if line["event"] == "start":
                    started[line["rank"]] = line["pid"]
                elif line["event"] == "ready":  # who has asked for a rank knows it by now
                    pids[line["rank"]] = started.get(line["rank"]) or started[None]
        return {rank: pid for rank, pid in pids.items() if rank != 0 and os.path.exists(f"/proc/{pid}")}

    def server(self):
        return next(line["pid"] for line in self.lines() if line["event"] == "start" and line["rank"] == 0)

    def lose_one(self, name):
        # One of at least two, as the job ends with the last one. Nobody is killed twice: its loss is told first.
        living = self.living()
        if len(living) < 2:
            return False
        rank = choose.choice(sorted(living))
        try:
            os.kill(living[rank], signal.SIGKILL)
        except ProcessLookupError:
            return False
        if starter != "launcher":
            self.processes[rank].process.wait()
            again = Process(name, [*self.told, "--rank", choose.choice([str(rank), "auto"])])
            self.processes[rank] = again
            self.all.append(again)
        return True

    def wait(self, name):
        limit = time.time() + longest
        for rank, each in self.processes.items():
            try:
                code = each.process.wait(max(1, limit - time.time()))
            except subprocess.TimeoutExpired:
                sys.exit(f"{name}, {rank}: still there after {longest} s: {each.lines()[-3:]}")
            # One that was started as the others were ending finds no job any more.
            if code != 0 and not (code == 3 and rank):
                sys.exit(f"{name}, {rank}: exit code {code}: {each.lines()[-1]}")
        own = self.processes[None if starter == "launcher" else 0].lines()
        return own[-1]


def resident(pid):
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) // 1024 for line in file if line.startswith("VmRSS"))


def expect(holds, what):
    if not holds:
        sys.exit(f"{mode}, {starter}: {what}")


undisturbed = Job("undisturbed").wait("undisturbed")
job = Job("disturbed")
killed, next_at, begun, memory = 0, STEPS // (losses + 2), time.time(), []
while job.runs() and killed < losses and time.time() - begun < longest:
    time.sleep(0.02)
    lines = job.lines()
    steps = sum(line["event"] == "step" for line in lines)
    told = sum(line["event"] == "lost" for line in lines)
    due = time.time() - begun >= every * (killed + 1) and steps > 0 if every else steps >= next_at
    if due and told == killed and job.lose_one("disturbed"):
        killed += 1
        next_at = steps + STEPS // (losses + 2)
        memory.append(resident(job.server()))
end = job.wait("disturbed")
lines = job.lines()
lost = [line for line in lines if line["event"] == "lost"]
returned = [line for line in lines if line["event"] == "returned"]
print(f"{mode}, {starter}: {killed} killed, {len(lost)} lost, {len(returned)} returned, {STEPS} steps, "
      f"{sum(line['steps_back'] for line in lost)} given back, {end['updates']} updates, accuracy {end['accuracy']:.3f}, "
      f"undisturbed {undisturbed['accuracy']:.3f}, server {memory} MB", flush=True)
expect(killed == losses, f"{killed} killed, not {losses}: the job is too short")
expect(len(lost) == killed and end["lost"] == killed, "not as many lost lines as were killed")
expect(all(line["steps_in_doubt"] == 0 and line["kind"] == "peer_lost" for line in lost), "a lost line in doubt")
expect(len(returned) >= killed - 1, "not all came back")
expect(end["updates"] == STEPS, "not every step was made exactly once")
expect(end["live_rrefs"] == 0 and end["live_contexts"] == 0, "something is left of those who are gone")
if os.environ.get("LOSSES_TRAINED"):  # long enough for that
    expect(abs(end["accuracy"] - undisturbed["accuracy"]) <= 0.02, "another accuracy")
if starter == "launcher":
    expect(end["steps"] == STEPS and end["restarts"] == killed, "other steps or restarts in the last line")
if len(memory) >= 30:  # once the first few have made their threads' memory
    expect(memory[-1] - memory[9] <= 16, "the server grows with each loss")
