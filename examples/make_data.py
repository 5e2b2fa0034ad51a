"""Writes the data of the examples into a folder: ratings.txt and digits/. A seed always gives the same data.

usage: make_data.py [FOLDER] [SEED]

ratings.txt has a user, an item and a rating in each line, for matrix_factorization. digits/ has
small grey images of the digits in MNIST's file format, for mlp.
"""

import pathlib
import random
import struct
import sys


def write_ratings(path, draw, users=300, items=200, count=12000):
    """Writes ratings from 1 to 5: the dot product of a user's taste and an item's style, plus noise."""
    tastes = [[draw.gauss(0, 1) for _ in range(4)] for _ in range(users)]
    styles = [[draw.gauss(0, 0.5) for _ in range(4)] for _ in range(items)]
    with open(path, "w") as file:
        for _ in range(count):
            user, item = draw.randrange(users), draw.randrange(items)
            match = sum(a * b for a, b in zip(tastes[user], styles[item]))
            file.write(f"{user} {item} {min(max(3 + match + draw.gauss(0, 0.2), 1), 5):.2f}\n")


SHAPES = ["####.##.##.####", ".#.##..#..#.###", "###..#####..###", "###..####..####", "#.##.####..#..#",
          "####..###..####", "####..####.####", "###..#.#..#..#.", "####.#####.####", "####.####..####"]


def write_digits(folder, prefix, draw, count):
    """Writes noisy images of 8 x 8 pixels, each with a digit of 3 x 5 pixels at a random place."""
    images, labels = bytearray(), bytearray()
    for _ in range(count):
        digit, top, left = draw.randrange(10), draw.randrange(4), draw.randrange(6)
        pixels = [draw.randrange(90) for _ in range(64)]
        for i, mark in enumerate(SHAPES[digit]):
            if mark == "#":
                pixels[(top + i // 3) * 8 + left + i % 3] = 160 + draw.randrange(96)
        images.extend(pixels)
        labels.append(digit)
    (folder / f"{prefix}-images-idx3-ubyte").write_bytes(struct.pack(">4i", 0x803, count, 8, 8) + images)
    (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(struct.pack(">2i", 0x801, count) + labels)


def main(folder=".", seed="1"):
    folder = pathlib.Path(folder)
    (folder / "digits").mkdir(parents=True, exist_ok=True)
    draw = random.Random(int(seed))
    write_ratings(folder / "ratings.txt", draw)
    write_digits(folder / "digits", "train", draw, 4000)
    write_digits(folder / "digits", "t10k", draw, 500)


if __name__ == "__main__":
    main(*sys.argv[1:])
