"""usage: generations.py DISTRAIN FOLDER TRIAL...: see generations.sh. A TRIAL is a function at the end of this file, and
FOLDER holds `images` and `job.token`.

Ranks 0 and 2 have a launcher with --max-restarts. Rank 1 is started by hand and reaches rank 0 through a gate that can
hold back their messages. Then rank 2 is killed, and the job restarts as generation 1 with a new rank 1. The old rank 1
does not notice, because the gate is closed. Then the gate delivers the held messages late, to ranks that join or that
work."""

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
from checkpoint_files import newest_checkpoint  # noqa: E402
from free_port import free_port  # noqa: E402

distrain, folder, *trials = sys.argv[1:]
LIMIT = float(os.environ.get("DISTRAIN_TEST_LIMIT", "40"))  # seconds that one wait may take
KINDS = {getattr(handshake, name): name.lower() for name in ("HELLO", "REJECT", "DIRECTORY", "PROOF", "JOINED")}
# The peer timeout is long, because ranks are stopped or cannot hear each other.
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
    """A process of the program, with the lines that it prints."""

    started = 0

    def __init__(self, *arguments, environment=None):
        Process.started += 1
        self.path = f"{folder}/{Process.started}"
        with open(self.path + ".json", "w") as out, open(self.path + ".err", "w") as err:
            self.process = subprocess.Popen([distrain, "ps", *map(str, arguments), *COMMON], stdout=out, stderr=err,
                                            stdin=subprocess.DEVNULL, env={**os.environ, **(environment or {})})

    def lines(self, event=None):
        """Returns the lines of these events, or all lines."""
        with open(self.path + ".json") as file:
            text = file.read()
        lines = map(json.loads, text[: text.rfind("\n") + 1].splitlines())
        return [line for line in lines if event in (None, line["event"])]

    def wait_for(self, event, count=1):
        wait_until(f"{count} {event} lines of {self.path}", lambda: len(self.lines(event)) >= count)

    def pid_of(self, rank):
        """Returns the pid of the rank's last process."""
        return [line["pid"] for line in self.lines("start") if line["rank"] == rank][-1]

    def end(self, codes, words=""):
        """Waits for the end and checks exit code and message; returns the last line."""
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
        """Waits until a `warn` line reports that rank 1 was refused."""
        def is_told():
            told = [line["message"] for line in self.lines("warn")]
            return any(each.startswith("refused rank 1 from 127.0.0.1:") and words in each for each in told)

        wait_until(f"{self.path} warns: {words}", is_told)


class Passage:
    """A connection of rank 1 to the gate."""

    def __init__(self, client):
        self.client, self.server = client, None
        self.said = b""  # all bytes that rank 1 has sent
        self.passed = 0  # the number of these bytes that were passed on to rank 0

    def connect(self, port):
        self.server = socket.create_connection(("127.0.0.1", port))

    def late(self):
        return self.said[self.passed:]


class Gate(threading.Thread):
    """A proxy between rank 1 and the port of rank 0. While `holds` is true it passes on neither bytes nor the end of a
    connection. It passes on nothing on connections after the first `most`."""

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
        except OSError:  # the receiver has closed the connection
            pass

    def pass_on(self, passage):
        self.write(passage.server, passage.late())
        passage.passed = len(passage.said)

    def close(self, passage):
        """Closes both ends. All bytes have been passed on before."""
        for end in (passage.client, passage.server):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except (AttributeError, OSError):
                pass

    def deliver(self, passages):
        """Delivers the held bytes of each passage on a new connection to the process that listens at the port now."""
        with self.lock:
            self.holds = False
            for passage in passages:
                passage.connect(self.port)
                self.pass_on(passage)
                self.watch(self.down, passage, passage.server)


def hear(port, words):
    """Sends `words` to the port and returns the kinds of the frames received until the other side closes."""
    link = handshake.Connection(socket.create_connection(("127.0.0.1", port), timeout=LIMIT))
    link.say(words)
    heard = []
    while (kind := link.hear()[0]) is not None:
        heard.append(KINDS.get(kind, kind))
    link.socket.close()
    return heard


def say_again(name, port, passages):
    """Replays, on new connections, all bytes that rank 1 of generation 0 has sent, and the bytes that were held."""
    for number, passage in enumerate(passages, 1):
        for part, words in (("all", passage.said), ("late", passage.late())):
            if words:
                heard = hear(port, words)
                if not {"hello", "reject"}.issuperset(heard):
                    sys.exit(f"{name}: what generation 0 has said is answered by {heard}")


def check_saved(name):
    step, files = newest_checkpoint(f"{folder}/{name}")
    expected_step, expected = newest_checkpoint(f"{folder}/undisturbed")
    if not expected or step != expected_step or files != expected:
        others = [each for each in expected if files.get(each) != expected[each]]
        sys.exit(f"{name}: {step} differs from {expected_step} in {others}")


class Restarted:
    """A job that has restarted as generation 1 and waits for its rank 1. Rank 1 of generation 0 is behind the closed
    gate, or stopped by a signal."""

    def __init__(self, name, most, is_enough, stops=False):
        self.name, self.port = name, free_port()
        self.gate = Gate(self.port, most)
        self.job = Process(*JOB, "--ranks", "0,2", "--master-port", self.port, "--job-id", "nightly", "--max-restarts",
                           3, "--checkpoint", f"{folder}/{name}")
        self.job.wait_for("start")  # then rank 0 listens at the port
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
        """Starts the new rank 1 and stops it at work, so that the job does not end before finish()."""
        saves = len(self.job.lines("checkpoint"))
        self.new = Process("--rank", 1, "--master-port", self.port, "--job-id", "nightly")
        self.job.wait_for("checkpoint", saves + 1 + (saves > 0))  # one of the lines may be about loading
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
    """Rank 1 of generation 0 has joined; its connection for calls reaches rank 0 of generation 1."""
    run = Restarted("first-words", 1, lambda run: len(run.gate.passages) > 1 and run.gate.passages[1].said)
    run.meet()
    run.gate.deliver(run.gate.passages[1:])
    run.old.end([5], "rank 1 cannot reach rank 0 (parameter_server): rank 0 does not know the secret of this job's "
                     "ranks (it says that it is of generation 1, rank 1 of 0)")
    run.job.await_refusal("rank 1 does not know the secret of this job's ranks (it says that it is of generation 0, "
                          "rank 0 of 1)")
    run.finish()


def calls_late():
    """Heartbeats and calls of rank 1 of generation 0 reach rank 0 of generation 1, and a replay of all its messages."""
    run = Restarted("calls", sys.maxsize, lambda run: run.job.lines("checkpoint"))
    wait_until("something is held", lambda: all(each.late() for each in run.gate.passages))
    say_again("calls, while they meet", run.port, run.gate.passages)
    run.job.await_refusal("rank 1 has another token than rank 0")  # a replayed proof proves nothing
    run.meet()
    run.gate.deliver(run.gate.passages)
    if run.old.end([4, 5])["cause_rank"] != 0:  # it receives the refusal, or only the end of the connection
        sys.exit(f"rank 1 of generation 0 blames another: {run.old.lines()[-1]}")
    say_again("calls, at work", run.port, run.gate.passages)
    stale = {"SLURM_PROCID": "1", "SLURM_NTASKS": "3", "SLURM_STEP_ID": "0", "SLURM_RESTART_COUNT": "0"}
    Process("--master-port", run.port, "--job-id", "nightly", environment=stale).end(
        [3], "rank 0 is of generation 1, rank 1 of 0")
    run.finish()


def stopped_meanwhile():
    """Rank 1 of generation 0 is stopped; its connections have ended when it continues."""
    run = Restarted("stopped", sys.maxsize, lambda run: run.job.lines("checkpoint"), stops=True)
    run.meet()
    os.kill(run.old.process.pid, signal.SIGCONT)
    if run.old.end([5])["cause_rank"] not in (0, 2):
        sys.exit(f"rank 1 of generation 0 blames another: {run.old.lines()[-1]}")
    run.finish()


def two_generations():
    """Ranks as torchrun starts them; one rank has another restart count than rank 0."""
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
    # Rank 0 might restart later, so a rank of a newer generation retries until the join timeout.
    start(1, 2, "--join-timeout", 2).end([3], "--join-timeout): rank 0 there is still of generation 1")
    others = [start(1, 1), start(2, 1)]
    for each in (*others, zero):
        each.end([0])
    check_saved("two")


Process(*JOB, "--checkpoint", f"{folder}/undisturbed").end([0])
for trial in trials:
    begun = time.monotonic()
    globals()[trial]()
    print(f"{trial}: {time.monotonic() - begun:.1f} s")
