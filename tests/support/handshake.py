"""A second implementation of the handshake of connections to a rank, to test the first one. The handshake is described
in include/distrain/wire/handshake.h and in Note [Identity] of src/membership/proof.h.
"""

import hashlib
import hmac
import os
import socket
import struct

HELLO, REJECT, DIRECTORY, PREPARED, GO, PROOF, JOIN, JOINED = 1, 2, 3, 4, 5, 6, 7, 8
JOINS, PEER, BULK = 1, 2, 3  # purposes of a connection
TOKEN, SAME_USER, ANYBODY = 1, 2, 3
MAGIC, VERSION = b"DTRN", 11

# fractional digits of pi, as in src/wire/frame.cpp
FACTORS = (
    0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89, 0x452821E638D01377,
    0xBE5466CF34E90C6C, 0xC0AC29B7C97C50DD, 0x3F84D5B5B5470917, 0x9216D5D98979FB1B, 0xD1310BA698DFB5AC,
    0x2FFD72DBD01ADFB7)


def text(value):
    return struct.pack("<I", len(value)) + value


def frame(kind, meta, meta_bytes=None, payload_bytes=0, number=0):
    length = len(meta) if meta_bytes is None else meta_bytes
    rest = struct.pack("<HHIIQQQQ", kind, 0, length, 0, payload_bytes, number, 0, 0)
    words = struct.unpack("<11I", rest)
    hashed = sum(word * factor for word, factor in zip(words, FACTORS)) % (1 << 64) >> 32
    return struct.pack("<I", int.from_bytes(MAGIC, "little") ^ hashed) + rest + meta


def hello(rank, purpose=JOINS, trust=SAME_USER, generation=0, job=bytes(16), nonce=None, version=VERSION,
          incarnation=0):
    return struct.pack("<IBBiII", version, purpose, trust, rank, generation, incarnation) + job + (nonce or os.urandom(32))


def join(job=b"distrain ps", size=0, options=()):
    meta = text(job) + struct.pack("<i", size) + text(b"") + struct.pack("<H", 1) + text(b"") + text(b"")
    return meta + struct.pack("<I", len(options)) + b"".join(text(n) + text(v) for n, v in options)


def key(secret, purpose, side):
    """Derives a key of 32 bytes by HKDF-SHA256."""
    use = {JOINS: b"join ", PEER: b"peer ", BULK: b"bulk "}[purpose] + side
    extracted = hmac.new(b"distrain", secret or b"\0", hashlib.sha256).digest()
    return hmac.new(extracted, use + b"\x01", hashlib.sha256).digest()


def proof(secret, purpose, side, first, second):
    return hmac.new(key(secret, purpose, side), first + second, hashlib.sha256).digest()


class Connection:
    """A connection to or from a rank. Discards data to be sent if the other side has disconnected."""

    def __init__(self, connected):
        self.socket = connected

    def say(self, data):
        try:
            self.socket.sendall(data)
        except OSError:
            pass

    def read(self, count):
        data = b""
        while len(data) < count:
            try:
                part = self.socket.recv(count - len(data))
            except OSError:
                return None
            if not part:
                return None
            data += part
        return data

    def hear(self):
        """Returns the kind and body of the next frame, which has no payload, or (None, b"") if the other side has
        disconnected. Sets `number` to the frame's call ID."""
        header = self.read(48)
        if header is None:
            return None, b""
        kind, _, length = struct.unpack("<HHI", header[4:12])
        self.number = struct.unpack("<Q", header[24:32])[0]
        body = self.read(length)
        return (None, b"") if body is None else (kind, body)

    def introduce(self, own, secret, purpose):
        """Authenticates as the connecting side. Returns whether the other side has proved its identity."""
        self.say(frame(HELLO, own))
        kind, theirs = self.hear()
        if kind != HELLO:
            return False
        self.say(frame(PROOF, proof(secret, purpose, b"initiator", own, theirs)))
        kind, answer = self.hear()
        return kind == PROOF and hmac.compare_digest(answer, proof(secret, purpose, b"responder", own, theirs))

    def await_end(self):
        """Waits until the other side has disconnected."""
        try:
            while self.socket.recv(1 << 16):
                pass
        except OSError:
            pass
        self.socket.close()

    def reset(self):
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()
