"""usage: generations.py DISTRAIN FOLDER: see generations.sh. FOLDER holds `images` and `job.token`.

Ranks 0 and 2 have a launcher with --max-restarts. Rank 1 is started by hand, and reaches rank 0 through a gate,
which can hold what the two say to each other. Then rank 2 is killed. The job starts again, as generation 1, with a
new rank 1; that of generation 0 knows nothing of it, as nothing comes through the gate. What was held then comes
late: to ranks that meet, or that are at work."""

import glob
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "support"))
import handshake  # noqa: E402

distrain, folder = sys.argv[1:]
LIMIT = float(os.environ.get("DISTRAIN_TEST_LIMIT", "40"))  # seconds to wait for anything
KINDS = {getattr(handshake, name): name.lower() for name in ("HELLO", "REJECT", "DIRECTORY", "PROOF", "JOINED")}
# Silence is no loss for long: ranks are stopped here, or do not hear each other.
COMMON = ["--token-file", f"{folder}/job.token", "--transport", "tcp", "--threads", "1", "--peer-timeout", "60"]
JOB = ["--data", f"{folder}/images", "--mode", "sync", "--epochs", "12", "--checkpoint-every", "5", "--seed", "5",
       "--log-interval", "1000000"]


def wait_until(what, is_so):
    deadline = time.monotonic() + LIMIT
    while not is_so():
        if time.monotonic() > deadline:
            sys.exit(f"{what}: not so after {LIMIT} s")
        time.sleep(0.01)


class Process:
    """Of the program, with the lines that it prints."""

    started = 0

    def __init__(self, *arguments, environment=None):
        Process.started += 1
        self.path = f"{folder}/{Process.started}"
        with open(self.path + ".json", "w") as out, open(self.path + ".err", "w") as err:
            self.process = subprocess.Popen([distrain, "ps", *map(str, arguments), *COMMON], stdout=out, stderr=err,
                                            stdin=subprocess.DEVNULL, env={**os.environ, **(environment or {})})

    def lines(self, event=None):
        """Of those events, or all of them."""
        with open(self.path + ".json") as file:
            text = file.read()
        lines = map(json.loads, text[: text.rfind("\n") + 1].splitlines())
        return [line for line in lines if event in (None, line["event"])]

    def wait_for(self, event, count=1):
        wait_until(f"{count} {event} lines of {self.path}", lambda: len(self.lines(event)) >= count)

    def pid_of(self, rank):
        """As it was started last."""
        return [line["pid"] for line in self.lines("start") if line["rank"] == rank][-1]

    def end(self, codes, words=""):
        """Its last line, which is to say that. It exits with one of the codes."""
        try:
            got = self.process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            sys.exit(f"{self.path} has not ended after {LIMIT} s: {self.lines()[-2:]}")
        end = self.lines()[-1]
        if got not in codes:
            sys.exit(f"{self.path} exits with {got}, not {codes}: {end}")
        if words not in end.get("message", ""):
            sys.exit(f"{self.path}: does not say '{words}': {end['message']}")
        return end

    def await_refusal(self, words):
        """Of rank 1, in a `warn` line."""
        def is_told():
            told = [line["message"] for line in self.lines("warn")]
            return any(each.startswith("refused rank 1 from 127.0.0.1:") and words in each for each in told)

        wait_until(f"{self.path} warns: {words}", is_told)


class Passage:
    """A connection of rank 1 to the gate."""

    def __init__(self, client):
        self.client, self.server = client, None
        self.said = b""  # by rank 1, all of it
        self.passed = 0  # how much of that rank 0 has got

    def connect(self, port):
        self.server = socket.create_connection(("127.0.0.1", port))

    def late(self):
        return self.said[self.passed:]


class Gate(threading.Thread):
    """Between rank 1 and the port of rank 0. As long as `holds` is true nothing passes, not even that one of the
    two has gone; connections beyond the first `most` wait from the beginning."""

    def __init__(self, port, most):
        super().__init__(daemon=True)
        self.port, self.most, self.holds = port, most, False
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.own_port = self.listener.getsockname()[1]
        self.passages = []
        self.lock = threading.Lock()
        self.start()

    def run(self):
        while True:
            passage = Passage(self.listener.accept()[0])
            if len(self.passages) < self.most:
                passage.connect(self.port)
                self.watch(self.down, passage, passage.server)
            self.passages.append(passage)
            self.watch(self.up, passage)

    def watch(self, way, *what):
        threading.Thread(target=way, args=what, daemon=True).start()

    def up(self, passage):
        while data := self.read(passage.client):
            with self.lock:
                passage.said += data
                if passage.server and not self.holds:
                    self.pass_on(passage)
        self.close(passage)

    def down(self, passage, server):
        while data := self.read(server):
            with self.lock:
                if self.holds or passage.server is not server:
                    return
                self.write(passage.client, data)
        if not self.holds:
            self.close(passage)

    def read(self, source):
        try:
            return source.recv(1 << 16)
        except OSError:
            return b""

    def write(self, sink, data):
        try:
            sink.sendall(data)
        except OSError:  # it has refused what came before, or has gone
            pass

    def pass_on(self, passage):
        self.write(passage.server, passage.late())
        passage.passed = len(passage.said)

    def close(self, passage):
        """Both ends: what one of them says last has been passed on by then."""
        for end in (passage.client, passage.server):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except (AttributeError, OSError):
                pass

    def deliver(self, passages):
        """What was held of these, to whoever listens at the port now: by a new connection each."""
        with self.lock:
            self.holds = False
            for passage in passages:
                passage.connect(self.port)
                self.pass_on(passage)
                self.watch(self.down, passage, passage.server)


def hear(port, words):
    """Says them to whoever listens there. Kinds of the frames that it answers with before it closes."""
    link = handshake.Connection(socket.create_connection(("127.0.0.1", port), timeout=LIMIT))
    link.say(words)
    heard = []
    while (kind := link.hear()[0]) is not None:
        heard.append(KINDS.get(kind, kind))
    link.socket.close()
    return heard


def say_again(name, port, passages):
    """All that rank 1 of generation 0 has said, and what had not arrived of it, on connections of their own."""
    for number, passage in enumerate(passages, 1):
        for part, words in (("all", passage.said), ("late", passage.late())):
            if words:
                heard = hear(port, words)
                if not {"hello", "reject"}.issuperset(heard):
                    sys.exit(f"{name}: what generation 0 has said is answered by {heard}")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def saved(name):
    """The files of the newest checkpoint, but for the manifest, which has the number of the run."""
    newest = sorted(glob.glob(f"{folder}/{name}/step-*"))[-1]
    files = {}
    for path in sorted(glob.glob(newest + "/*.safetensors")):
        with open(path, "rb") as file:
            files[os.path.basename(path)] = file.read()
    return os.path.basename(newest), files


def check_saved(name):
    (step, files), (expected_step, expected) = saved(name), saved("undisturbed")
    if step != expected_step or files != expected:
        others = [each for each in expected if files.get(each) != expected[each]]
        sys.exit(f"{name}: {step} differs from {expected_step} in {others}")


class Restarted:
    """A job that has gone on to generation 1, without rank 1 so far, and with rank 1 of generation 0 at the gate, or
    stopped by a signal."""

    def __init__(self, name, most, is_enough, stops=False):
        self.name, self.port = name, free_port()
        self.gate = Gate(self.port, most)
        self.job = Process(*JOB, "--ranks", "0,2", "--master-port", self.port, "--job-id", "nightly", "--max-restarts",
                           3, "--checkpoint", f"{folder}/{name}")
        self.job.wait_for("start")  # somebody listens there
        self.old = Process("--rank", 1, "--master-port", self.gate.own_port, "--job-id", "nightly")
        self.job.wait_for("ready", 2)
        wait_until(f"{name}: generation 0 is at work", lambda: is_enough(self))
        if stops:
            os.kill(self.old.process.pid, signal.SIGSTOP)
        else:
            self.gate.holds = True
        os.kill(self.job.pid_of(2), signal.SIGKILL)
        self.job.wait_for("restart")
        self.job.wait_for("start", 4)

    def meet(self):
        """They stay at work until finish()."""
        saves = len(self.job.lines("checkpoint"))
        self.new = Process("--rank", 1, "--master-port", self.port, "--job-id", "nightly")
        self.job.wait_for("checkpoint", saves + 1 + (saves > 0))  # one of them may be the one that is loaded
        os.kill(self.new.process.pid, signal.SIGSTOP)
        if self.new.process.poll() is not None:
            sys.exit(f"{self.name}: has ended before anybody came")

    def finish(self):
        os.kill(self.new.process.pid, signal.SIGCONT)
        self.new.end([0])
        if self.job.end([0])["restarts"] != 1:
            sys.exit(f"{self.name}: was started again more often")
        check_saved(self.name)


def first_words_late():
    """Rank 1 of generation 0 has joined, and connects for calls: rank 0 of generation 1 is there."""
    run = Restarted("first-words", 1, lambda run: len(run.gate.passages) > 1 and run.gate.passages[1].said)
    run.meet()
    run.gate.deliver(run.gate.passages[1:])
    run.old.end([5], "rank 1 cannot reach rank 0 (parameter_server): rank 0 does not know the secret of this job's "
                     "ranks (it says that it is of generation 1, rank 1 of 0)")
    run.job.await_refusal("rank 1 does not know the secret of this job's ranks (it says that it is of generation 0, "
                          "rank 0 of 1)")
    run.finish()


def calls_late():
    """It has trained. Its heartbeats and calls come to rank 0 of generation 1, and all that it has said before."""
    run = Restarted("calls", sys.maxsize, lambda run: run.job.lines("checkpoint"))
    wait_until("something is held", lambda: all(each.late() for each in run.gate.passages))
    say_again("calls, while they meet", run.port, run.gate.passages)
    run.job.await_refusal("rank 1 has another token than rank 0")  # for all that it has proved by saying it again
    run.meet()
    run.gate.deliver(run.gate.passages)
    if run.old.end([4, 5])["cause_rank"] != 0:  # whether it hears the refusal, or only that the connection ends
        sys.exit(f"rank 1 of generation 0 blames another: {run.old.lines()[-1]}")
    say_again("calls, at work", run.port, run.gate.passages)
    stale = {"SLURM_PROCID": "1", "SLURM_NTASKS": "3", "SLURM_STEP_ID": "0", "SLURM_RESTART_COUNT": "0"}
    Process("--master-port", run.port, "--job-id", "nightly", environment=stale).end(
        [3], "rank 0 is of generation 1, rank 1 of 0")
    run.finish()


def stopped_meanwhile():
    """Its connections have ended when it goes on."""
    run = Restarted("stopped", sys.maxsize, lambda run: run.job.lines("checkpoint"), stops=True)
    run.meet()
    os.kill(run.old.process.pid, signal.SIGCONT)
    if run.old.end([5])["cause_rank"] not in (0, 2):
        sys.exit(f"rank 1 of generation 0 blames another: {run.old.lines()[-1]}")
    run.finish()


def two_generations():
    """As torchrun starts them: one rank is of another start than rank 0."""
    port = free_port()

    def start(rank, generation, *arguments):
        told = {"RANK": str(rank), "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "nightly",
                "TORCHELASTIC_RESTART_COUNT": str(generation)}
        return Process(*arguments, environment=told)

    zero = start(0, 1, *JOB, "--checkpoint", f"{folder}/two")
    zero.wait_for("start")
    start(1, 0).end([3], "rank 0 is of generation 1, rank 1 of 0")
    zero.await_refusal("rank 1 is of generation 0, rank 0 of 1: the job has been started again since")
    # It might be for rank 0 to be started again: this one asks until its time is over.
    start(1, 2, "--join-timeout", 2).end([3], "--join-timeout): rank 0 there is still of generation 1")
    others = [start(1, 1), start(2, 1)]
    for each in (*others, zero):
        each.end([0])
    check_saved("two")


Process(*JOB, "--checkpoint", f"{folder}/undisturbed").end([0])
for each in (two_generations, stopped_meanwhile, first_words_late, calls_late):
    begun = time.monotonic()
    each()
    print(f"{each.__name__}: {time.monotonic() - begun:.1f} s")
