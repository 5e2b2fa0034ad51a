"""A proxy between a rank and the rank that it joins, which injects network faults into their connections.

usage: proxy.py PORT [fault...]

Listens on a port of its own, which it prints first, and forwards each connection to PORT of this host. A fault is
CONNECTION/DIRECTION/KIND=VALUE, such as 2/up/cut=700:

  CONNECTION  the number of the connection in the order of acceptance, from 1; *: each connection
  DIRECTION   up: bytes from the connecting process; down: bytes to it; both: the direction that reaches AT first
              triggers the fault, and a stall or drop then affects both directions
  KIND=VALUE
    delay=S   each byte arrives S seconds later
    rate=N    at most N bytes per second
    piece=N   at most N bytes per write
    cut=AT    both ends of the connection are closed, as when a process exits
    reset=AT  both ends are closed by RST
    stall=AT  the proxy stops reading
    drop=AT   the proxy reads all further bytes and discards them
    flip=AT:B the proxy inverts bit B of this byte

AT is an offset in bytes, or FRAME.BYTE, both from 0, with frames as in include/distrain/wire/frame.h. When a fault at
an offset happens, the proxy prints "hit FAULT TIME", with the time in seconds since 1970.
"""

import heapq
import itertools
import select
import socket
import struct
import sys
import time

HEADER = 48
READ = 1 << 16
MOST_HELD = 4 << 20  # bytes held in one direction; the proxy reads no more than that ahead


class Place:
    """An AT. The offset of FRAME.BYTE is known once the header of the frame before has arrived."""

    def __init__(self, text):
        frame, dot, byte = text.partition(".")
        self.frame = int(frame) if dot else None
        self.byte = int(byte if dot else frame)

    def offset(self, starts):
        if self.frame is None:
            return self.byte
        return starts[self.frame] + self.byte if self.frame < len(starts) else None


class Fault:
    def __init__(self, text):
        self.text = text
        where, equals, value = text.partition("=")
        connection, direction, self.kind = where.split("/")
        self.connection = None if connection == "*" else int(connection)
        self.directions = ("up", "down") if direction == "both" else (direction,)
        self.number = float(value) if self.kind in ("delay", "rate", "piece") else None
        if self.number is None:
            place, _, bit = value.partition(":")
            self.place, self.bit = Place(place), int(bit or 0)
        known = ("delay", "rate", "piece", "cut", "reset", "stall", "drop", "flip")
        if not equals or self.kind not in known or not set(self.directions) <= {"up", "down"}:
            raise ValueError(f"what is the fault {text}?")

    def hit(self):
        print("hit", self.text, time.time(), flush=True)


class Way:
    """One direction of one connection."""

    def __init__(self, source, sink, faults):
        self.source, self.sink = source, sink
        self.settings = {f.kind: f.number for f in faults if f.number is not None}
        self.faults = [f for f in faults if f.number is None]
        self.starts, self.header = [0], b""  # offsets of the known frames; part of a header
        self.come = 0  # bytes received
        self.held = []  # a heap of (time at which to send, number, bytes)
        self.held_bytes = 0
        self.numbers = itertools.count()
        self.budget_at = time.monotonic()  # the time at which `rate` allows the next byte
        self.other = None  # the Way of the other direction
        self.state = "open"  # or stalled, dropping, ended (by the source), done (the sink is closed, too)
        self.blocked = False  # the sink's buffer is full

    def reads(self):
        return self.state in ("open", "dropping") and self.held_bytes < MOST_HELD

    def follow_frames(self, data):
        at = 0
        while at < len(data):
            ahead = self.starts[-1] - (self.come + at)
            if ahead > 0:
                at += ahead
                continue
            more = data[at : at + HEADER - len(self.header)]
            self.header += more
            at += len(more)
            if len(self.header) == HEADER:
                meta, _, payload = struct.unpack_from("<IIQ", self.header, 8)
                body = meta if payload == 0 else -(-meta // 64) * 64 + payload
                self.starts.append(self.come + at + body)
                self.header = b""
            else:
                break

    def take(self, data):
        """Handles received bytes. Returns the fault that ends the connection, or None."""
        begin = self.come
        self.follow_frames(data)
        self.come += len(data)
        end = None
        for fault in sorted(self.faults, key=lambda f: f.kind != "flip"):
            place = fault.place.offset(self.starts)
            if place is None or not begin <= place < self.come:
                continue
            fault.hit()
            if fault.kind == "flip":
                data = bytearray(data)
                data[place - begin] ^= 1 << fault.bit
                data = bytes(data)
                continue
            data = data[: place - begin]
            if fault.kind in ("stall", "drop"):
                for way in (self, self.other) if len(fault.directions) == 2 else (self,):
                    way.state = "stalled" if fault.kind == "stall" else "dropping"
            else:
                end = fault
        self.hold(data)
        return end

    def hold(self, data):
        if not data:
            return
        due = time.monotonic() + self.settings.get("delay", 0)
        heapq.heappush(self.held, (due, next(self.numbers), data))
        self.held_bytes += len(data)

    def due(self):
        """Returns the time of the next write, or None if there is nothing to write now."""
        if not self.held or self.blocked:
            return None
        return max(self.held[0][0], self.budget_at if "rate" in self.settings else 0)

    def write(self):
        while self.held and not self.blocked:
            now = time.monotonic()
            if self.due() > now:
                return
            due, number, data = self.held[0]
            most = len(data)
            if "rate" in self.settings:  # at most the bytes of 0.01 s at a time
                most = max(1, int(self.settings["rate"] / 100))
            most = int(min(most, self.settings.get("piece", most)))
            try:
                sent = self.sink.send(data[:most])
            except BlockingIOError:
                self.blocked = True
                return
            if "rate" in self.settings:
                self.budget_at = now + sent / self.settings["rate"]
            self.held_bytes -= sent
            if sent < len(data):
                self.held[0] = (due, number, data[sent:])  # remains the first entry
            else:
                heapq.heappop(self.held)
        if self.state == "ended" and not self.held:
            self.state = "done"
            self.sink.shutdown(socket.SHUT_WR)


def connect(port):
    """Connects to the port. Retries for a minute, because the process that will listen may still be starting."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port))
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


class Connection:
    def __init__(self, number, client, port, faults):
        client.setblocking(False)
        server = connect(port)
        server.setblocking(False)
        self.sockets = (client, server)
        for s in self.sockets:
            s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        mine = [f for f in faults if f.connection in (None, number)]
        self.ways = [
            Way(source, sink, [f for f in mine if direction in f.directions])
            for source, sink, direction in ((client, server, "up"), (server, client, "down"))
        ]
        self.ways[0].other, self.ways[1].other = self.ways[1], self.ways[0]
        self.is_open = True

    def close(self, reset):
        for s in self.sockets:
            if reset:
                s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            s.close()
        self.is_open = False

    def flush(self):
        """Sends all held bytes before the connection is closed, as far as the sinks accept them."""
        for way in self.ways:
            while way.held:
                _, _, data = heapq.heappop(way.held)
                try:
                    way.sink.send(data)
                except OSError:
                    return

    def read(self, way):
        try:
            data = way.source.recv(READ)
        except BlockingIOError:
            return
        if not data:
            way.state = "ended" if way.state == "open" else way.state
            if way.state == "dropping":
                way.state = "stalled"  # does not forward the end of the connection
            return
        if way.state == "dropping":
            return
        end = way.take(data)
        if end:
            self.flush()
            self.close(end.kind == "reset")

    def step(self, readable, writable):
        try:
            for way in self.ways:
                if way.sink in writable:
                    way.blocked = False
                if self.is_open and way.source in readable and way.reads():
                    self.read(way)
                if self.is_open:
                    way.write()
            if self.is_open and all(way.state == "done" for way in self.ways):
                self.close(False)
        except OSError:  # one side has disconnected: resets the other side
            self.close(True)


def main():
    port = int(sys.argv[1])
    faults = [Fault(text) for text in sys.argv[2:]]
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    print(listener.getsockname()[1], flush=True)
    connections, number = [], 0
    while True:
        ways = [way for c in connections for way in c.ways]
        dues = [due for due in (way.due() for way in ways) if due is not None]
        wait = max(0, min(dues) - time.monotonic()) if dues else None
        readable, writable, _ = select.select(
            [listener] + [way.source for way in ways if way.reads()],
            [way.sink for way in ways if way.blocked], [], wait)
        for connection in connections:
            connection.step(readable, writable)
        connections = [c for c in connections if c.is_open]
        if listener in readable:
            client, _ = listener.accept()
            number += 1
            try:
                connections.append(Connection(number, client, port, faults))
            except OSError:  # no process listens
                number -= 1
                client.close()


main()
