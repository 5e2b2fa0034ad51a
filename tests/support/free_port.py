"""Prints a free port below the kernel's ephemeral ports, so that the kernel does not assign it to another test before
the job binds it."""

import os
import socket


def free_port():
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
            end = min(int(file.read().split()[0]), 32768)
    except OSError:
        end = 32768
    begin = max(1024, end - 16384)
    if end - begin < 1000:  # too few: use the ephemeral ports
        begin, end = 32768, 60999
    while True:
        with socket.socket() as probe:
            port = begin + int.from_bytes(os.urandom(4), "big") % (end - begin)
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port


if __name__ == "__main__":
    print(free_port())
