"""Stands between a rank and the one that it joins, and does to their connections what networks do.

usage: proxy.py PORT [fault...]

Listens on a port of its own, which is the first line of its output, and connects whoever comes to PORT of
this host. A fault is CONNECTION/DIRECTION/KIND=VALUE, such as 2/up/cut=700:

  CONNECTION  1 is the first that is accepted; * is each
  DIRECTION   up: what the one who connects sends; down: what it gets; both: what comes to its place
              first stalls or drops the two of them
  KIND=VALUE
    delay=S   everything comes S seconds later
    rate=N    N bytes a second
    piece=N   at most N bytes a write
    cut=AT    the connection is closed, to both sides, as a process that ends does it
    reset=AT  the same with RST
    stall=AT  nothing is read any more
    drop=AT   what comes is read and thrown away
    flip=AT:B bit B of the byte there is another one

AT counts bytes, or is FRAME.BYTE: both from 0, frames as in include/distrain/wire/frame.h. A fault that
happens at a place is told as "hit FAULT TIME", with the time in seconds since 1970, when it does.
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
MOST_HELD = 4 << 20  # bytes on their way in one direction; the sender waits then


class Place:
    """AT, once it is known: that of a frame is when the one before it has come."""

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
        self.starts, self.header = [0], b""  # of the frames so far; what has come of the last header
        self.come = 0  # bytes
        self.held = []  # (when it may go, number, bytes), a heap
        self.held_bytes = 0
        self.numbers = itertools.count()
        self.budget_at = time.monotonic()  # with a rate: when the next byte may go
        self.other = None  # the other direction
        self.state = "open"  # stalled, dropping, ended (the source has), done (and the sink knows)
        self.blocked = False  # the sink takes nothing now

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
        """What has come. Gives back the fault that ends the connection, if one does."""
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
        """When there is something to write."""
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
            if "rate" in self.settings:  # a hundredth of a second's worth at a time
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
                self.held[0] = (due, number, data[sent:])  # still the first
            else:
                heapq.heappop(self.held)
        if self.state == "ended" and not self.held:
            self.state = "done"
            self.sink.shutdown(socket.SHUT_WR)


def connect(port):
    """To whoever listens there, soon perhaps: they may still be starting."""
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
        """Before an orderly end: what came before it arrives, if the sinks take it."""
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
                way.state = "stalled"  # nothing is told of the end either
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
        except OSError:  # one side is gone: the other hears it the same way
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
            except OSError:  # nobody is there
                number -= 1
                client.close()


main()
