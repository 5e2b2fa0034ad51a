"""Trains the model of examples/dlrm.cpp in one process with PyTorch alone, on the same files.

    dlrm.py TRAIN TEST [--shards N] [--batch-size N] ...

Reads the lines of TRAIN in their order: each batch has the next --batch-size / --shards lines of each of N equal ranges
of bytes, as the batches of N trainers with --shuffle-buffer 0. Categories are numbered by a dict. Prints a JSON line
with the loss and the AUC on TEST, and the steps and examples per second of training without the time to parse lines.
"""
import argparse
import json
import math
import os
import time

import torch
from torch import nn

NUMBERS, CATEGORIES = 13, 26


class Ids:
    """Numbers each pair of a column and a text."""

    def __init__(self):
        self.of_column = [{} for _ in range(CATEGORIES)]
        self.count = 0

    def number(self, column, text):
        ids = self.of_column[column]
        if text not in ids:
            ids[text] = self.count
            self.count += 1
        return ids[text]


def lines_of_shard(path, shard, shards):
    """Yields the lines whose first byte is in a range of bytes."""
    size = os.path.getsize(path)
    first, end = size * shard // shards, size * (shard + 1) // shards
    with open(path, "rb", buffering=1 << 20) as file:
        if first > 0:
            file.seek(first - 1)
            file.readline()
        at = file.tell()
        for line in file:
            if at >= end:
                return
            at += len(line)
            yield line


def log_of(text):
    return math.log1p(max(int(text), 0)) if text else 0.0


def batches(path, shards, batch_size, ids):
    """Yields labels, numbers, categories, and the seconds to read and parse them."""
    sources = [lines_of_shard(path, shard, shards) for shard in range(shards)]
    while True:
        start = time.perf_counter()
        labels, numbers, categories = [], [], []
        for source in sources:
            for _, line in zip(range(batch_size // shards), source):
                fields = line.rstrip(b"\n").split(b"\t")
                labels.append(float(fields[0]))
                numbers.append([log_of(text) for text in fields[1 : 1 + NUMBERS]])
                categories.append([ids.number(i, text) for i, text in enumerate(fields[1 + NUMBERS :])])
        if not labels:
            return
        tensors = torch.tensor(labels), torch.tensor(numbers), torch.tensor(categories)
        yield *tensors, time.perf_counter() - start


class Dlrm(nn.Module):
    def __init__(self, dim, rows):
        super().__init__()
        self.pair = torch.tril_indices(CATEGORIES + 1, CATEGORIES + 1, -1)
        self.bottom = nn.Sequential(nn.Linear(NUMBERS, 64), nn.ReLU(), nn.Linear(64, dim), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(dim + self.pair.shape[1], 64), nn.ReLU(), nn.Linear(64, 1))
        self.table = nn.Embedding(rows, dim, sparse=True)
        nn.init.uniform_(self.table.weight, -1 / dim, 1 / dim)

    def forward(self, numbers, categories):
        dense = self.bottom(numbers)
        vectors = torch.cat([dense.unsqueeze(1), self.table(categories)], 1)
        dots = torch.bmm(vectors, vectors.transpose(1, 2))[:, self.pair[0], self.pair[1]]
        return self.top(torch.cat([dense, dots], 1)).squeeze(1)


def auc_of(scores, labels):
    """Returns the share of pairs of a positive and a negative example with the greater score on the positive one."""
    negative = scores[labels == 0].sort().values
    positive = scores[labels == 1]
    below = torch.searchsorted(negative, positive) + torch.searchsorted(negative, positive, right=True)
    return below.double().sum().item() / 2 / (len(negative) * len(positive))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("train")
    parser.add_argument("test")
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=128, help="examples of all shards together")
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--rows", type=int, default=1 << 23, help="the most categories of both files")
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)

    ids = Ids()
    model = Dlrm(options.dim, options.rows)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=options.lr)
    bce = nn.functional.binary_cross_entropy_with_logits
    steps = examples = 0
    parse_s, start = 0.0, time.perf_counter()
    for labels, numbers, categories, seconds in batches(options.train, options.shards, options.batch_size, ids):
        optimizer.zero_grad()
        bce(model(numbers, categories), labels).backward()
        optimizer.step()
        steps, examples, parse_s = steps + 1, examples + len(labels), parse_s + seconds
    train_s = time.perf_counter() - start - parse_s
    rows = ids.count

    scores, targets = [], []
    with torch.no_grad():
        for labels, numbers, categories, _ in batches(options.test, 1, options.batch_size, ids):
            scores.append(model(numbers, categories))
            targets.append(labels)
    scores, targets = torch.cat(scores), torch.cat(targets)
    result = {"loss": bce(scores, targets).item(), "auc": auc_of(scores, targets), "steps": steps, "examples": examples,
              "rows": rows, "steps_per_s": steps / train_s, "samples_per_s": examples / train_s, "parse_s": parse_s}
    print(json.dumps(result))


main()
