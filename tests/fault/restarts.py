"""usage: restarts.py DISTRAIN FOLDER JOB [HOST...]: see restarts.sh.

Runs a job, then again while one of its ranks is killed every RESTARTS_EVERY seconds for RESTARTS_SECONDS. With
--max-restarts the second run continues each time, and its last checkpoint must have the same files as the first run's.
HOSTs are network namespaces with one launcher each, which share the ranks of the job; rank 0 is on the first HOST, at
10.79.0.10."""

import json
import os
import random
import signal
import subprocess
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "support"))
from checkpoint_files import newest_checkpoint  # noqa: E402

distrain, folder, job, *hosts = sys.argv[1:]
seconds = float(os.environ.get("RESTARTS_SECONDS", "6"))
every = float(os.environ.get("RESTARTS_EVERY", "2"))
longest = float(os.environ.get("RESTARTS_LONGEST", "150"))  # seconds for one run
size = float(os.environ.get("RESTARTS_SIZE", "1"))  # factor for the length of the job
at_least = int(os.environ.get("RESTARTS_AT_LEAST", "1"))
choose = random.Random(int(os.environ.get("RESTARTS_SEED", "1")))

JOBS = {  # number of ranks, length, other options
    "hybrid": (4, "epochs", 600, "--mode sync --checkpoint-every 20"),
    "tables": (5, "epochs", 600, "--mode sync --checkpoint-every 20 --servers 2 --optimizer adam"),
    # Each rank sleeps before each call, so that the job lasts long enough without much work.
    "ps": (4, "epochs", 5, f"--data {folder}/images --mode sync --trainers 3 --batch-size 4 --checkpoint-every 3 "
                           "--inject delay=20ms"),
    "rnn": (3, "epochs", 300, "--mode sync --trainers 2 --checkpoint-every 20"),
    "rl": (3, "max-episodes", 400, "--observers 2 --max-steps 200 --checkpoint-every 5"),
    "pipeline": (3, "batches", 40,
                 "--model resnet50 --image-size 32 --batch-size 8 --micro-batches 2 --checkpoint-every 1"),
}
PROGRAMS = {"tables": "hybrid"}
GOOD = {"rl": (0, 11)}  # exit codes of success; rl may miss its goal


class Launcher:
    def __init__(self, name, number, arguments, prefix):
        self.path = f"{folder}/{job}.{name}.{number}.json"
        with open(self.path, "w") as out, open(f"{folder}/{job}.{name}.{number}.err", "w") as err:
            self.process = subprocess.Popen([*prefix, distrain, PROGRAMS.get(job, job), *arguments], stdout=out, stderr=err,
                                            stdin=subprocess.DEVNULL)

    def lines(self):
        with open(self.path) as file:
            text = file.read()
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def pids(self):
        """Returns the pids of the launcher's current ranks by rank."""
        found = {}
        for line in self.lines():
            if line["event"] == "restart":
                found = {}
            elif line["event"] == "start":
                found[line["rank"]] = line["pid"]
        return found


def start(name):
    ranks, length, count, rest = JOBS[job]
    arguments = [f"--{length}", str(int(count * size)), *rest.split(), "--seed", "5", "--peer-timeout", "30",
                 "--log-interval", "1000000"]
    saves = ["--checkpoint", f"{folder}/{job}.{name}"]
    again = [] if name == "undisturbed" else ["--max-restarts", str(max(50, 2 * at_least))]
    if not hosts:
        return [Launcher(name, 0, [*arguments, *saves, *again], [])]
    share = [list(range(ranks))[number :: len(hosts)] for number in range(len(hosts))]
    found = []
    for number, host in enumerate(hosts):
        where = ["--ranks", ",".join(map(str, share[number])), "--master-addr", "10.79.0.10", "--insecure",
                 "--join-timeout", "60", "--threads", "1"]  # by default each launcher would use all cores
        told = [*arguments, *saves] if number == 0 else []
        found.append(Launcher(name, number, [*told, *again, *where], ["ip", "netns", "exec", host]))
    return found


def restarts_of(launchers):
    return [len([line for line in each.lines() if line["event"] == "restart"]) for each in launchers]


def disturb(launchers):
    """Kills ranks and returns their number. It may exceed the number of restarts, because on a slow machine a rank may
    be killed while others are still restarting."""
    killed, begun = 0, time.time()
    while any(each.process.poll() is None for each in launchers):
        if time.time() - begun >= seconds and min(restarts_of(launchers)) >= at_least:
            break
        time.sleep(every)
        victims = [pid for each in launchers for pid in each.pids().values()]
        choose.shuffle(victims)
        for pid in victims:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:  # the rank has already ended
                continue
            killed += 1
            break
    return killed


def give_up(launchers, why):
    for each in launchers:
        each.process.kill()
    sys.exit(why)


def wait(launchers, name):
    limit = time.time() + longest
    for number, each in enumerate(launchers):
        try:
            code = each.process.wait(max(1, limit - time.time()))
        except subprocess.TimeoutExpired:
            give_up(launchers, f"{name}, launcher {number}: still there after {longest} s: {each.lines()[-3:]}")
        if code not in GOOD.get(job, (0,)):
            give_up(launchers, f"{name}, launcher {number}: exit code {code}: {each.lines()[-1]}")


def saved(name):
    return newest_checkpoint(f"{folder}/{job}.{name}")


began = time.time()
wait(start("undisturbed"), "undisturbed")
alone = time.time() - began
began = time.time()
launchers = start("disturbed")
killed = disturb(launchers)
wait(launchers, "disturbed")
restarts = restarts_of(launchers)
errors = [line["message"] for each in launchers for line in each.lines() if line["event"] == "error"]
print(f"{job}: {alone:.1f} s undisturbed, {time.time() - began:.1f} s with {killed} kills and {restarts} restarts, "
      f"step {saved('disturbed')[0]}", flush=True)
if errors and job not in GOOD:
    sys.exit(f"error lines: {errors}")
if saved("undisturbed")[0] is None or saved("undisturbed") != saved("disturbed"):
    (first, files), (second, others) = saved("undisturbed"), saved("disturbed")
    sys.exit(f"{first} and {second} differ in {[n for n in files if files[n] != others.get(n)]}")
if min(restarts) < at_least:
    sys.exit("too few restarts")
