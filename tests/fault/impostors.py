"""usage: impostors.py DISTRAIN FOLDER COUNT JOB...: see impostors.sh.

Starts the ranks of each JOB one by one, with a token and over TCP, while impostors connect to all listening ranks:
before all ranks have joined, while they work and while they end. Repeats the job until COUNT impostors have connected.
No impostor may be admitted, and the job must end with the numbers of an undisturbed run. FOLDER holds `images` and
`job.token`.
"""

import json
import os
import random
import socket
import subprocess
import sys
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "support"))
import handshake  # noqa: E402
from free_port import free_port  # noqa: E402
from handshake import (BULK, DIRECTORY, HELLO, JOINED, JOINS, PEER, PROOF, SAME_USER, TOKEN, Connection, frame, hello,  # noqa: E402
                       proof)

distrain, folder, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
SEED = int(os.environ.get("DISTRAIN_SEED", "1"))
LIMIT = 300  # seconds for one job
MOST_HELD = 20

JOBS = {  # options, number of ranks, and the fields that two runs have in common
    "ps": (f"--data {folder}/images --mode sync --dropout off --epochs 8", 3, ("loss", "accuracy", "steps")),
    "hybrid": ("--mode sync --epochs 60", 4, ("loss", "steps")),
    "rnn": ("--mode sync --trainers 2 --epochs 20", 3, ("loss", "perplexity", "steps")),
    "rl": ("--observers 2 --max-steps 100 --max-episodes 40", 3, ()),
    "pipeline": ("--model resnet50 --image-size 64 --batch-size 8 --micro-batches 2 --batches 3", 3, ("loss",)),
}


def listening_ports(pid):
    """Returns the ports of the TCP sockets that the process listens on."""
    inodes = set()
    try:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            target = os.readlink(f"/proc/{pid}/fd/{fd}")
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    except OSError:
        return set()
    ports = set()
    for table in ("tcp", "tcp6"):
        with open(f"/proc/net/{table}") as file:
            for line in list(file)[1:]:
                words = line.split()
                if words[3] == "0A" and words[9] in inodes:
                    ports.add(int(words[1].rpartition(":")[2], 16))
    return ports


class Impostors(threading.Thread):
    """Impostors know everything but the token. `recorded` is a real handshake from another connection."""

    def __init__(self, port, token, seed):
        super().__init__()
        self.token, self.random = token, random.Random(seed)
        self.ports, self.met, self.made, self.believed = {port}, set(), 0, []
        self.over = False
        self.held = []
        self.recorded = None

    def connect(self):
        port = self.random.choice(sorted(self.ports))
        try:
            link = Connection(socket.create_connection(("127.0.0.1", port), timeout=30))
            self.met.add(port)
            return link
        except OSError:
            self.ports = {each for each in self.ports if each != port} or self.ports
            time.sleep(0.01)
            return None

    def record(self):
        """Records the handshake of a rank that knows the token, and disconnects."""
        link = self.connect()
        if link is None:
            return
        own = hello(1, JOINS, TOKEN)
        link.say(frame(HELLO, own))
        theirs = link.hear()[1]
        own_proof = proof(self.token, JOINS, b"initiator", own, theirs)
        link.say(frame(PROOF, own_proof))
        kind, their_proof = link.hear()
        if kind == PROOF:
            self.recorded = own, own_proof, theirs, their_proof
        link.socket.close()

    def finish(self, link, kind, is_held=False):
        """Reads the answers: the other side may refuse, but must not admit the impostor."""
        if is_held and len(self.held) < MOST_HELD:
            self.held.append(link)
            return
        if self.held and self.random.random() < 0.3:
            self.held.pop(0).socket.close()
        while True:
            heard = link.hear()[0]
            if heard is None:
                break
            if heard in (PROOF, JOINED, DIRECTORY):
                self.believed.append(kind)
        link.socket.close()

    def try_proof(self, kind, own, make_proof):
        link = self.connect()
        if link is None:
            return
        link.say(frame(HELLO, own))
        heard, theirs = link.hear()
        if heard == HELLO:
            link.say(frame(PROOF, make_proof(theirs)))
        self.finish(link, kind)

    def rank(self):
        return self.random.choice((-1, 0, 1, 2, 3, 7))

    def peer_hello_and_close(self):
        link = self.connect()
        if link is not None:
            link.say(frame(HELLO, hello(self.rank(), PEER, TOKEN)))
            link.socket.close()

    def peer_hello_and_hold(self):
        link = self.connect()
        if link is not None:
            link.say(frame(HELLO, hello(self.rank(), PEER, TOKEN)))
            self.finish(link, "held", is_held=len(self.held) < MOST_HELD)

    def guess(self):
        purpose = self.random.choice((JOINS, PEER, BULK))
        secret = self.random.choice((b"", b"guess", self.random.randbytes(32)))
        own = hello(self.rank(), purpose, self.random.choice((TOKEN, TOKEN, SAME_USER)))
        self.try_proof("guess", own, lambda theirs: proof(secret, purpose, b"initiator", own, theirs))

    def replay(self):
        own, own_proof, theirs, their_proof = self.recorded
        said = self.random.choice(((own, own_proof), (theirs, their_proof), (own, their_proof), (theirs, own_proof)))
        self.try_proof("replay", said[0], lambda _: said[1])

    def reflect(self):
        """Sends the other side's own messages from one connection back to it on another one."""
        link = self.connect()
        if link is None:
            return
        link.say(frame(HELLO, hello(1, JOINS, TOKEN)))
        kind, theirs = link.hear()
        if kind == HELLO:
            self.try_proof("reflect", theirs, lambda _: self.random.randbytes(32))
        link.socket.close()

    def truncate(self):
        own, own_proof = self.recorded[:2]
        link = self.connect()
        if link is None:
            return
        said = frame(HELLO, own) + frame(PROOF, own_proof)
        link.say(said[: self.random.randrange(len(said))])
        link.reset() if self.random.random() < 0.5 else link.socket.close()

    def mutate(self):
        """Sends a valid proof for a hello in which one field differs between sending and receiving."""
        purpose = JOINS
        own = hello(1, purpose, TOKEN)
        fields = ((0, 4), (4, 5), (5, 6), (6, 10), (10, 14), (14, 18), (18, 34), (34, 66))
        begin, end = self.random.choice(fields)

        def changed(words):
            at = self.random.randrange(begin, end)
            other = bytes([words[at] ^ (1 << self.random.randrange(8))])
            return words[:at] + other + words[at + 1:]

        if self.random.random() < 0.5:
            said = changed(own)
            self.try_proof(f"mutated {begin}", said,
                           lambda theirs: proof(self.token, purpose, b"initiator", own, theirs))
        else:
            self.try_proof(f"mutated answer {begin}", own,
                           lambda theirs: proof(self.token, purpose, b"initiator", own, changed(theirs)))

    def take_the_other_side(self):
        """Sends a valid proof of the wrong side, or for another purpose."""
        own = hello(1, JOINS, TOKEN)
        purpose, side = self.random.choice(((JOINS, b"responder"), (PEER, b"initiator"), (BULK, b"responder")))
        self.try_proof("side", own, lambda theirs: proof(self.token, purpose, side, own, theirs))

    def run(self):
        kinds = (self.peer_hello_and_close, self.peer_hello_and_hold, self.guess, self.replay, self.reflect,
                 self.truncate, self.mutate, self.take_the_other_side)
        while not self.over:
            if self.recorded is None:
                self.record()
                continue
            self.random.choice(kinds)()
            self.made += 1
        for link in self.held:
            link.socket.close()


def end_of(path):
    with open(path) as file:
        lines = [json.loads(line) for line in file]
    return lines[-1]


def start(job, rank, port):
    options, _, _ = JOBS[job]
    out, err = open(f"{folder}/rank{rank}", "w"), open(f"{folder}/err{rank}", "w")
    return subprocess.Popen(
        [distrain, job, *options.split(), "--rank", str(rank), "--master-port", str(port), "--token-file",
         f"{folder}/job.token", "--transport", "tcp", "--threads", "1", "--peer-timeout", "60"],
        stdout=out, stderr=err, stdin=subprocess.DEVNULL)


def run(job, token=None):
    """Returns the `end` line of rank 0, and the impostors if there were any."""
    ranks = JOBS[job][1]
    port = free_port()
    processes = [start(job, 0, port)]
    impostors = None
    if token:
        impostors = Impostors(port, token, SEED)
        impostors.start()
    for rank in range(1, ranks):
        before = impostors.made if impostors else 0
        while impostors and impostors.is_alive() and impostors.made < min(count, before + count // 8):
            time.sleep(0.01)
        processes.append(start(job, rank, port))
    deadline = time.monotonic() + LIMIT
    while any(process.poll() is None for process in processes):
        if time.monotonic() > deadline:
            for process in processes:
                process.kill()
            raise SystemExit(f"{job}: has not ended after {LIMIT} s")
        if impostors:
            for process in processes:
                impostors.ports = impostors.ports | listening_ports(process.pid)
        time.sleep(0.05)
    if impostors:
        impostors.over = True
        impostors.join()
    end = end_of(f"{folder}/rank0")
    codes = [process.returncode for process in processes]
    wanted = [11 if job == "rl" else 0] + [0] * (ranks - 1)
    if codes != wanted:
        raise SystemExit(f"{job}: exit codes {codes}: {end.get('message')}")
    return end, impostors


def check(job, end, expected, impostors):
    print(f"{job}: {impostors.made} impostors at {len(impostors.met)} ports, {len(impostors.believed)} believed")
    if impostors.believed:
        raise SystemExit(f"{job}: believed: {set(impostors.believed)}")
    for name in JOBS[job][2]:
        if end.get(name) != expected.get(name):
            raise SystemExit(f"{job}: {name} is {end.get(name)}, not {expected.get(name)}")
    if end["live_rrefs"] or end["live_contexts"]:
        raise SystemExit(f"{job}: something is left: {end}")


def main():
    with open(f"{folder}/job.token", "rb") as file:
        token = file.read().strip()
    made = 0
    for job in sys.argv[4:]:
        expected, _ = run(job)
        of_job = 0
        while of_job < count:
            end, impostors = run(job, token)
            of_job += impostors.made
            check(job, end, expected, impostors)
        made += of_job
        for rank in range(JOBS[job][1]):
            for name in (f"rank{rank}", f"err{rank}"):
                with open(f"{folder}/{name}", "rb") as file:
                    if token in file.read():
                        raise SystemExit(f"{job}: rank {rank} tells the token")
    print(made, "impostors in all")


main()
