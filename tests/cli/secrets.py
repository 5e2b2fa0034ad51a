"""usage: secrets.py record PORT FILE
       secrets.py find SECRET PATH...

record: listens on a port of its own, which it prints first, and forwards connections to PORT of this host. Rank 0 sends
the secret of the job's connections on the first connection; the secret is written to FILE.

find: prints each file, of these PATHs and in these folders, whose content or name contains the content of the file
SECRET, literally or in a common encoding.
"""

import base64
import os
import socket
import sys
import threading
import urllib.parse

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "support"))
from handshake import DIRECTORY, Connection, frame  # noqa: E402


def pump(source, sink):
    try:
        while data := source.recv(1 << 16):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        pass


def record(port, path):
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    is_first = True
    while True:
        client = listener.accept()[0]
        server = socket.create_connection(("127.0.0.1", port))
        threading.Thread(target=pump, args=(client, server), daemon=True).start()
        if is_first:
            pass_on_until_directory(Connection(server), client, path)
        is_first = False
        threading.Thread(target=pump, args=(server, client), daemon=True).start()


def pass_on_until_directory(rank_0, client, path):
    while True:
        kind, body = rank_0.hear()
        client.sendall(frame(kind, body, number=rank_0.number))
        if kind == DIRECTORY:  # its last field is the secret, a text of 32 bytes
            assert body[-36:-32] == (32).to_bytes(4, "little"), "this is no directory"
            with open(path, "wb") as file:
                file.write(body[-32:])
            return


def base64_within(secret):
    """Yields, for each of three offsets, the base64 digits that depend only on the secret inside a longer text."""
    for before in range(3):
        digits = base64.b64encode(bytes(before) + secret)
        begin = -(-before * 8 // 6)
        yield digits[begin : (before + len(secret)) * 8 // 6]


def spellings(secret):
    yield "as it is", secret
    yield "in UTF-16", b"".join(bytes([byte, 0]) for byte in secret)
    yield "in hexadecimal", secret.hex().encode()
    yield "in hexadecimal", secret.hex().upper().encode()
    yield "in hexadecimal", secret.hex(" ").encode()
    yield "in hexadecimal", secret.hex(":").encode()
    for digits in base64_within(secret):
        yield "in base64", digits
        yield "in base64", digits.replace(b"+", b"-").replace(b"/", b"_")
    yield "as a URL", urllib.parse.quote(secret, safe="").encode()
    yield "as JSON", secret.replace(b"/", b"\\/")
    yield "backwards", secret[::-1]


def all_spellings(path):
    with open(path, "rb") as file:
        secret = file.read()
    found = dict((words, name) for name, words in spellings(secret.strip()) if len(words) >= 16)
    try:  # a token is base64, and the decoded bytes are as secret as the token
        decoded = base64.b64decode(secret, validate=False) if secret.isascii() else b""
        found.update((words, name + ", decoded") for name, words in spellings(decoded) if len(words) >= 16)
    except ValueError:
        pass
    return found


def files(path):
    if not os.path.isdir(path):
        yield path
    for folder, _, names in os.walk(path):
        for name in names:
            yield os.path.join(folder, name)


def find(secret, paths):
    wanted = all_spellings(secret)
    for path in (each for given in paths for each in files(given)):
        with open(path, "rb") as file:
            words = os.fsencode(path) + b"\0" + file.read()
        found = sorted({name for spelling, name in wanted.items() if spelling in words})
        if found:
            print(f"{path}: {', '.join(found)}")


if sys.argv[1] == "record":
    record(int(sys.argv[2]), sys.argv[3])
else:
    find(sys.argv[2], sys.argv[3:])
