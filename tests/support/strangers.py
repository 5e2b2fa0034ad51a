"""Connects to a rank that waits for others, as those do who are not among them.

usage: strangers.py PORT COUNT RANK SEED

COUNT connections to PORT of this host, of all kinds in turn: hellos that do not agree with the job, those of
RANK, which is missing, that end once the directory might come; half-open ones, in the midst of a header, of a
hello, or before either; garbage; and ends without a word or by RST. Those that are left open are, until all
are made: "open N" says how many. Then a line on stdin closes them, and "closed" says that the rank has seen it.
"""

import random
import socket
import struct
import sys
import time

HELLO, PREPARED = 1, 4
MAGIC, VERSION = b"DTRN", 4  # a hello may have the magic as it is


def text(value):
    return struct.pack("<I", len(value)) + value


def frame(kind, meta, meta_bytes=None, payload_bytes=0):
    length = len(meta) if meta_bytes is None else meta_bytes
    return MAGIC + struct.pack("<HHIIQQQQ", kind, 0, length, 0, payload_bytes, 0, 0, 0) + meta


def hello(rank, version=VERSION, job=b"distrain", size=0, options=(), proof=b"", purpose=1):
    meta = struct.pack("<IB", version, purpose) + text(job) + struct.pack("<ii", rank, size)
    meta += text(b"") + struct.pack("<H", 1) + text(b"") + text(b"")
    meta += struct.pack("<I", len(options)) + b"".join(text(n) + text(v) for n, v in options) + text(proof)
    return frame(HELLO, meta)


class Strangers:
    def __init__(self, port, rank, seed):
        self.port, self.rank, self.random = port, rank, random.Random(seed)
        self.open = []

    def connect(self):
        deadline = time.monotonic() + 60
        while True:
            try:
                return socket.create_connection(("127.0.0.1", self.port), timeout=60)
            except ConnectionRefusedError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def say(self, data):
        stranger = self.connect()
        try:
            stranger.sendall(data)
        except OSError:  # it has heard enough
            pass
        return stranger

    def await_end(self, stranger):
        """Until the rank has closed it."""
        try:
            while stranger.recv(1 << 16):
                pass
        except ConnectionResetError:
            pass
        stranger.close()

    def disagree(self):
        choices = (
            hello(0), hello(-1), hello(1 << 30), hello(1),  # taken, the last one
            hello(self.rank, version=self.random.randrange(1 << 32) & ~VERSION), hello(self.rank, job=b"another"),
            hello(self.rank, size=77), hello(self.rank, options=[(b"epochs", b"99")]),
            hello(self.rank, purpose=2), hello(1, purpose=2, proof=self.random.randbytes(16)),
            hello(self.rank, job=b"x" * 60000), frame(PREPARED, b""))
        self.await_end(self.say(self.random.choice(choices)))

    def come_and_go(self):
        """As a rank that dies: its place is free again."""
        self.say(hello(self.rank)).close()

    def half_open(self):
        whole = hello(self.rank)
        self.open.append(self.say(whole[: self.random.choice((0, 1, 4, 20, 47, 48, 60, len(whole) - 1))]))

    def claim_more(self):
        """A frame whose rest, up to what a hello may have, never comes; or of which too much would."""
        length = self.random.choice((65536, 65000))
        self.open.append(self.say(frame(HELLO, b"\0" * self.random.randrange(2000), meta_bytes=length)))
        self.await_end(self.say(frame(HELLO, b"", meta_bytes=self.random.choice((65537, (1 << 32) - 1)))))

    def garbage(self):
        stranger = self.say(self.random.choice((b"", b"GET / HTTP/1.1\r\n", MAGIC)) +
                            self.random.randbytes(self.random.randrange(48, 5000)))
        if self.random.random() < 0.5:
            self.open.append(stranger)
        else:
            stranger.close()

    def reset(self):
        stranger = self.say(hello(self.rank)[: self.random.randrange(60)])
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        stranger.close()

    def catch_up(self):
        """A word that is no way to begin is answered behind all that came before it."""
        for _ in range(2):
            self.await_end(self.say(frame(PREPARED, b"")))


def main():
    port, count, rank, seed = (int(arg) for arg in sys.argv[1:])
    strangers = Strangers(port, rank, seed)
    kinds = (strangers.disagree, strangers.half_open, strangers.garbage, strangers.come_and_go,
             strangers.claim_more, strangers.reset)
    for i in range(count):
        kinds[i % len(kinds)]()
    strangers.catch_up()
    print("open", len(strangers.open), flush=True)
    sys.stdin.readline()
    for stranger in strangers.open:
        stranger.close()
    strangers.catch_up()
    print("closed", flush=True)


main()
