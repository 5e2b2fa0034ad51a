"""Records what people see of each job on terminals of 80 and 40 columns, and compares it with what is kept here.

    python3 tests/cli/terminal/record.py DISTRAIN [--all] [--update] [JOB | JOB.WAY]...

JOB.COLUMNS.txt has a section for each way to run the job: the screens of tmux at the moments that the tables below
name, with times and figures masked. Without names, the ways in `lean` run; with --all, all of them. --update writes
their sections anew. Each wait is for a text on the screen or for an event of the job, never for a duration.
"""
import concurrent.futures
import dataclasses
import difflib
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time

here = pathlib.Path(__file__).parent
limit = float(os.environ.get("DISTRAIN_TEST_LIMIT", 60))
hidden = "--peer-timeout 600"  # added to each command: a rank that is off the CPU for seconds is not lost


@dataclasses.dataclass
class Job:
    quick: str  # a command that trains for less than a second
    slow: str  # a command that trains until it is interrupted
    bar: tuple  # the live region at 80 and 40 columns once training is well under way, masked
    lost_rank: int  # the rank to kill
    after_loss: tuple = ()  # the live region after that; empty: the loss ends the job


pipeline = "distrain pipeline --model resnet18 --image-size 32 --batch-size 4 --threads 1"
hybrid = "distrain hybrid --threads 1 --trainers 1 --batches-per-epoch 2"
slow_hybrid = "distrain hybrid --threads 1 --trainers 3 --epochs 3 --batches-per-epoch 100000"
jobs = {
    "ps": Job(
        quick="distrain ps --data images --threads 1 --limit 80 --batch-size 10 --epochs 2",
        slow="distrain ps --data images --threads 1 --trainers 3 --batch-size 1 --epochs 50 "
        "--inject delay=50ms,delay=100ms@rank=1",
        bar=("epoch 1/50  [BAR]  PERCENT  N/16700  loss #.####  RATE  TIME\n"
             "trainer1 N    trainer2 N    trainer3 N\n",
             "PERCENT  N/16700  loss #.####\nslowest trainer1 N\n"),
        lost_rank=2,
        after_loss=("epoch 1/50  [BAR]  PERCENT  N/16700  loss #.####  RATE  TIME\n"
                    "trainer1 N    trainer2 lost at step N    trainer3 N\n",
                    "PERCENT  N/16700  loss #.####\nlost trainer2  slowest trainer1 N\n"),
    ),
    "rl": Job(
        quick="distrain rl --threshold 3 --log-interval 1",
        slow="distrain rl --log-interval 0 --inject delay=20ms",
        bar=("episode N  loss #.##  reward #.#  RATE  TIME\n", "episode N  loss #.##  reward #.#\n"),
        lost_rank=1,
    ),
    "rnn": Job(
        quick="distrain rnn --threads 1 --epochs 2",
        slow="distrain rnn --threads 1 --epochs 3 --batches-per-epoch 100000 --inject delay=20ms",
        bar=("epoch 1/3  [BAR]  PERCENT  N/300000  loss #.####  RATE  TIME\n", "PERCENT  N/300000  loss #.####\n"),
        lost_rank=1,
    ),
    "pipeline": Job(
        quick=f"{pipeline} --batches 2 --micro-batches 2",
        slow=f"{pipeline} --batches 9000 --micro-batches 2 --inject stage=20ms",
        bar=("[BAR]  PERCENT  N/9000  loss #.####  2 micro-batches  RATE  TIME\n", "PERCENT  N/9000  loss #.####\n"),
        lost_rank=2,
    ),
    "hybrid": Job(
        quick=f"{hybrid} --epochs 3",
        slow=f"{slow_hybrid} --inject delay=20ms,delay=50ms@rank=0",
        bar=("epoch 1/3  [BAR]  PERCENT  N/300000  loss #.####  RATE  TIME\n"
             "trainer0 N    trainer1 N    trainer2 N\n",
             "PERCENT  N/300000  loss #.####\nslowest trainer0 N\n"),
        lost_rank=4,
    ),
}


def ways(job):
    """Returns the steps of each way to run `job`. A step is one of
    `wait:PATTERN`, `bar:`, `after_loss:`: wait until the pattern, or a text of the job, is on the masked screen;
    `event:NAME`: waits until the job has written this event to the file `out`;
    `end:`: waits for the shell's next prompt; `reaped:`: waits until the command in the background has ended;
    `shot:`: keeps the screen that the last wait saw; `key:KEY`; `kill:RANK`;
    or a command line, which is typed at the shell's prompt."""
    loss = ["after_loss:", "shot:", "key:C-c"] if job.after_loss else []
    return {
        "foreground": [job.quick, "end:", "shot:"],
        "background": [f"{job.quick} > out &", "reaped:", "", "end:", "shot:"],
        "jq": [job.quick + " | jq -sc '[.[] | select(.event == \"end\").status]'", "end:", "shot:"],
        "file": [f"{job.quick} > out", "end:", "shot:"],
        "pretty": [f"{job.quick} --pretty", "end:", "shot:"],
        "interrupted": [f"{job.slow} > out", "bar:", "shot:", "key:C-c", "end:", "shot:"],
        "saved": [f"{job.slow} --checkpoint \"bob's runs\" > out", "bar:", "key:C-c", "end:", "shot:"],
        "lost": [f"{job.slow} > out", "bar:", f"kill:{job.lost_rank}", *loss, "end:", "shot:"],
        "waiting": [f"{job.quick} --rank 0 --master-port $port > out", r"wait:^waiting for ranks? \d.*SECONDS\)",
                    "shot:", "key:C-c", "end:", "shot:"],
    }


# Ways to run that are recorded for single jobs only, at 80 columns.
extras = {
    "rl": {"not solved": ["distrain rl --max-episodes 2 > out", "end:", "shot:"]},
    "rnn": {"pretty, piped": [f"{jobs['rnn'].quick} --pretty | cat", "end:", "shot:"]},
    "pipeline": {"two runs": [f"{pipeline} --batches 2 --micro-batches 1,2 > out", "end:", "shot:"]},
    "hybrid": {
        "null, local": [f"{hybrid} --epochs 2 --local > /dev/null", "end:", "shot:"],
        "dumb": [f"TERM=dumb {hybrid} --epochs 2 > out", "end:", "shot:"],
        "threads": ["distrain hybrid --trainers 1 --epochs 1 --threads $(($(nproc) + 1)) > out", "end:", "shot:"],
        "fg": [f"{jobs['hybrid'].slow} > out &", "event:ready", "fg", "bar:", "shot:", "key:C-c", "end:"],
        "pretty, interrupted": [f"{jobs['hybrid'].slow} --pretty", "bar:", "key:C-c", "end:", "shot:"],
        "no rank 0": [f"{hybrid} --rank 1 --master-port $port > out", r"wait:^waiting for.*SECONDS\)", "shot:",
                      "key:C-c", "end:", "shot:"],
    },
}
sessions = {(job, way, columns): steps for job, its in jobs.items() for columns in (80, 40)
            for way, steps in (ways(its) | (extras.get(job, {}) if columns == 80 else {})).items()}
others = ("ps.file", "ps.lost", "rl.interrupted", "pipeline.interrupted")  # ways that show what no way of hybrid shows
lean = [each for each in sessions if each[0] == "hybrid" or each[1] in extras.get(each[0], {}) or
        ".".join(each[:2]) in others]

masks = [
    (r"\{\"v\":.*\}", "{JSON}"),
    (r"(\{JSON\}\s*)+", "{JSON}\n"),
    (f" {hidden}", ""),
    (r"run [0-9a-f]{8}", "run RUN"),
    (r"\[[#.]+\]", "[BAR]"),
    (r"\d+:\d\d(:\d\d)?(<\d+(:\d\d)+)?", "TIME"),
    (r"\d+: this process may use \d+ CPUs?", "N: this process may use N CPUs"),
    (r"\[1\] \d+", "[1] PID"),
    (r"\d+(\.\d+)?/s", "RATE"),
    (r"^ ?\d+ %|(?<= ) ?\d+ %", "PERCENT"),
    (r"(the other process|\S+)(:? closed the connection|: connection reset by peer)", "CAUSE"),
    (r"\(\d+ s\)(: .*)?", "(SECONDS)"),  # the figure's width decides how much of the reason fits
    (r"(localhost:|port[ =])\d+", r"\1PORT"),
    (r"step-\d+", "step-STEP"),
    (r"\b\d+(?=/\d{3,} )", "N"),
    (r"^(nothing saved.*; |stopped: )[1-9]\d* steps?", r"\1N steps"),
    (r"^ \d+ steps? of epoch", " N steps of epoch"),
    (r"take over \d+ steps?", "take over N steps"),
    (r"^episode \d+", "episode N"),
    (r"(step|trainer\d) \d+", r"\1 N"),
    (r"-?\d+\.(\d+)", lambda figure: "#." + "#" * len(figure[1])),
]


def masked(screen):
    for pattern, by in masks:
        screen = re.sub(pattern, by, screen, flags=re.M)
    lines = [line.rstrip() for line in screen.rstrip().split("\n")]
    return "\n".join(lines) + "\n"


class Session:
    """A shell in a terminal and a folder of its own, in which a job runs in one way."""

    def __init__(self, folder, number, job, columns):
        self.job, self.columns = jobs[job], columns
        self.folder, self.server, self.target = folder / str(number), folder / "tmux", f"session{number}"
        self.prompts = 1
        self.folder.mkdir()
        (self.folder / "images").symlink_to(folder / "images")
        # While this socket holds the port, the kernel assigns it to no other process, but a job may listen on it.
        self.port = socket.socket()
        self.port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.port.bind(("", 0))
        shell = (f"cd '{self.folder}' && exec env -u RANK -u WORLD_SIZE -u NO_COLOR HISTFILE= LC_ALL=C PS1='$ ' "
                 f"TERM=screen port={self.port.getsockname()[1]} PATH=\"{folder}/bin:$PATH\" bash --norc --noprofile")
        self.tmux("new-session", "-d", "-s", self.target, "-x", str(columns), "-y", "40", shell)

    def tmux(self, *args):
        done = subprocess.run(["tmux", "-S", str(self.server), *args], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"tmux {args[0]}: {done.stderr}")
        return done.stdout

    def screen(self):
        return self.tmux("capture-pane", "-p", "-J", "-S", "-", "-t", self.target)

    def wait(self, what, is_so):
        deadline = time.monotonic() + limit
        while not is_so(screen := self.screen()):
            if time.monotonic() > deadline:
                raise RuntimeError(f"no {what} after {limit:.0f} s:\n{screen.rstrip()}")
            time.sleep(0.05)
        return screen

    def wait_for_text(self, pattern, name):
        return self.wait(name, lambda screen: re.search(pattern, masked(screen), re.M))

    def wait_for_prompt(self):
        def is_there(screen):
            return len(re.findall(r"^\$ ", screen, re.M)) == self.prompts and re.search(r"^\$\s*\Z", screen, re.M)

        return self.wait(f"prompt {self.prompts}", is_there)

    def send(self, *keys):
        self.tmux("send-keys", "-t", self.target, *keys)

    def events(self, name):
        out = self.folder / "out"
        lines = out.read_text().split("\n")[:-1] if out.exists() else []
        return [event for event in map(json.loads, lines) if event["event"] == name]

    def run(self, steps):
        """Returns the masked screens of the `shot:` steps."""
        shots = []
        for step in steps:
            what, _, rest = step.partition(":")
            if what == "wait":
                seen = self.wait_for_text(rest, rest)
            elif what in ("bar", "after_loss"):
                text = getattr(self.job, what)[self.columns == 40]
                seen = self.wait_for_text("^" + re.escape(text), text)
            elif what == "event":
                self.wait(f"event {rest}", lambda screen: self.events(rest))
            elif what == "end":
                seen = self.wait_for_prompt()
            elif what == "reaped":
                number = re.compile(r"^\[1\] (\d+)$", re.M)
                pid = number.search(self.wait("the number of the job", number.search)).group(1)
                self.wait(f"the end of process {pid}", lambda screen: not os.path.exists(f"/proc/{pid}"))
            elif what == "shot":
                shots.append(masked(seen))
            elif what == "key":
                self.send(rest)
            elif what == "kill":
                start = next(event for event in self.events("start") if event["rank"] == int(rest))
                os.kill(start["pid"], signal.SIGKILL)
            else:
                self.wait_for_prompt()
                self.send("-l", step)
                self.send("Enter")
                self.prompts += 1
        return ("-" * self.columns + "\n").join(shots)


def sections_of(file):
    """Returns the recorded screens of a file by way."""
    if not file.exists():
        return {}
    parts = re.split(r"^== (.*)\n", file.read_text(), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2]))


def record_all(pool, folder, distrain, chosen):
    """Yields (job, way, columns, screens or an error) for each chosen session."""
    (folder / "bin").mkdir()
    wrapper = folder / "bin/distrain"
    wrapper.write_text(f"#!/bin/bash\nexec -a distrain '{distrain}' \"$@\" {hidden}\n")
    wrapper.chmod(0o755)
    images = f"source '{here.parent}/lib.bash' /bin/true; make_images '{folder}/images' 1000 20"
    subprocess.run(["bash", "-c", images], check=True)
    # When this process ends in any way, no process has the pipe open for writing, so `cat` ends the server.
    os.mkfifo(folder / "alive")
    alive = os.open(folder / "alive", os.O_RDWR)
    server = ["tmux", "-S", str(folder / "tmux"), "-f", "/dev/null"]
    watch = f"cat '{folder}/alive'; tmux kill-server"
    subprocess.run([*server, "new-session", "-d", "-s", "watch", watch], check=True)

    def record(number, job, way, columns):
        try:
            return Session(folder, number, job, columns).run(sessions[job, way, columns])
        except (RuntimeError, StopIteration) as error:
            return error

    try:
        futures = [pool.submit(record, number, *each) for number, each in enumerate(chosen)]
        for each, future in zip(chosen, futures):
            yield (*each, future.result())
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        subprocess.run([*server, "kill-server"])
        os.close(alive)


def main():
    options = [each for each in sys.argv[1:] if each.startswith("--")]
    distrain, *names = [each for each in sys.argv[1:] if not each.startswith("--")]
    chosen = [each for each in sessions if each[0] in names or ".".join(each[:2]) in names]
    if not names:
        chosen = list(sessions) if "--all" in options else lean
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    failures = 0
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(4) as pool:
        for job, way, columns, seen in record_all(pool, pathlib.Path(folder), os.path.realpath(distrain), chosen):
            file = here / f"{job}.{columns}.txt"
            kept = sections_of(file)
            if isinstance(seen, Exception):
                failures += 1
                print(f"FAILED: {job}, {way}, {columns} columns: {seen}")
            elif "--update" in options:
                kept[way] = seen
                order = [way for way in (ways(jobs[job]) | extras.get(job, {})) if way in kept]
                file.write_text("".join(f"== {way}\n{kept[way]}" for way in order))
            elif kept.get(way) != seen:
                failures += 1
                before, now = kept.get(way, "").splitlines(True), seen.splitlines(True)
                lines = difflib.unified_diff(before, now, "kept", "seen", n=9)
                print(f"FAILED: {job}, {way}, {columns} columns:\n{''.join(lines)}")
    print(f"{len(chosen)} sessions, {failures} failed")
    sys.exit(failures > 0)


main()
