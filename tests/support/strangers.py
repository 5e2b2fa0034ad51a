"""Connects to a rank of `ps` that waits for other ranks, as processes that do not belong to the job.

usage: strangers.py PORT COUNT RANK SEED

Makes COUNT connections to PORT of this host, of all kinds in turn: ranks that disagree with the job; processes that
join as the missing RANK and die; connections that send part of a header or of a hello, or nothing more; too long
hellos; wrong proofs; garbage; and resets. Some stay open: when all are made, prints "open N". After a line on stdin,
closes them, waits until the rank has noticed, and prints "closed".
"""

import random
import socket
import sys
import time

from handshake import (DIRECTORY, HELLO, JOIN, JOINED, JOINS, MAGIC, PEER, PREPARED, PROOF, VERSION, Connection, frame,
                       hello, join)


class Strangers:
    def __init__(self, port, rank, seed):
        self.port, self.rank, self.random = port, rank, random.Random(seed)
        self.open = []

    def connect(self):
        deadline = time.monotonic() + 60
        while True:
            try:
                return Connection(socket.create_connection(("127.0.0.1", self.port), timeout=60))
            except ConnectionRefusedError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def say(self, data):
        stranger = self.connect()
        stranger.say(data)
        return stranger

    def believed(self, rank):
        """Returns a connection that has authenticated as `rank`. Retries, because the rank may be busy at first."""
        for _ in range(100):
            stranger = self.connect()
            if stranger.introduce(hello(rank), b"", JOINS):
                return stranger
        raise SystemExit("no stranger is believed")

    def disagree(self):
        """Authenticates, and then sends a Join that the rank must refuse."""
        rank, said = self.random.choice((
            (0, join()), (-2, join()), (1 << 30, join()), (1, join()),  # the last rank is taken
            (self.rank, join(job=b"another")), (self.rank, join(size=77)),
            (self.rank, join(options=[(b"epochs", b"99")])), (self.rank, join(job=b"x" * 15000)),
            (self.rank, join() + b"x"), (self.rank, join()[:-1])))
        stranger = self.believed(rank)
        stranger.say(frame(JOIN, said))
        if stranger.hear()[0] in (JOINED, DIRECTORY):
            raise SystemExit("a stranger has become a rank")
        stranger.await_end()

    def are_not_believed(self):
        said = self.random.choice((
            hello(self.rank, purpose=PEER), hello(self.rank, purpose=4), hello(self.rank, trust=0),
            hello(self.rank, version=self.random.randrange(1 << 32) & ~VERSION), hello(self.rank) + b"x"))
        self.say(frame(HELLO, said)).await_end()
        wrong = self.say(frame(HELLO, hello(self.rank)))
        wrong.hear()
        wrong.say(frame(PROOF, self.random.randbytes(32)))
        wrong.await_end()

    def come_and_go(self):
        """Joins as the missing rank and dies, which frees the place of the rank."""
        stranger = self.believed(self.rank)
        stranger.say(frame(JOIN, join()))
        stranger.socket.close()

    def half_open(self):
        whole = frame(HELLO, hello(self.rank)) + frame(PROOF, bytes(32))
        self.open.append(self.say(whole[: self.random.choice((0, 1, 4, 20, 47, 48, 60, 109, 110, 111, 158, 189))]))

    def claim_more(self):
        """Announces hellos of which a part never arrives, and hellos that are too long."""
        length = self.random.choice((127, 128))
        self.open.append(self.say(frame(HELLO, b"\0" * self.random.randrange(127), meta_bytes=length)))
        self.say(frame(HELLO, b"", meta_bytes=self.random.choice((129, 65537, (1 << 32) - 1)))).await_end()

    def garbage(self):
        stranger = self.say(self.random.choice((b"", b"GET / HTTP/1.1\r\n", MAGIC)) +
                            self.random.randbytes(self.random.randrange(48, 5000)))
        if self.random.random() < 0.5:
            self.open.append(stranger)
        else:
            stranger.socket.close()

    def reset(self):
        self.say(frame(HELLO, hello(self.rank))[: self.random.randrange(60)]).reset()

    def catch_up(self):
        """Waits until the rank has handled all earlier bytes: it closes a connection after an invalid first frame."""
        for _ in range(2):
            self.say(frame(PREPARED, b"")).await_end()


def main():
    port, count, rank, seed = (int(arg) for arg in sys.argv[1:])
    strangers = Strangers(port, rank, seed)
    kinds = (strangers.disagree, strangers.half_open, strangers.garbage, strangers.come_and_go,
             strangers.claim_more, strangers.are_not_believed, strangers.reset)
    for i in range(count):
        kinds[i % len(kinds)]()
    strangers.catch_up()
    print("open", len(strangers.open), flush=True)
    sys.stdin.readline()
    for stranger in strangers.open:
        stranger.socket.close()
    strangers.catch_up()
    print("closed", flush=True)


main()
