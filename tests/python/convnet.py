"""Evaluates PyTorch's own ConvNet with the weights of a checkpoint on an IDX test set.

usage: convnet.py images <folder>                  writes IDX files that can be learned from
       convnet.py evaluate <folder> <checkpoint>   prints JSON: accuracy, loss, tensors
       convnet.py inspect <checkpoint>             prints JSON: shapes by file and name
"""
import json
import pathlib
import struct
import sys

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors.torch import load_file

MEAN, STD = 0.1307, 0.3081


class Net(nn.Module):
    """The ConvNet of github.com/pytorch/examples, mnist/main.py, with the tutorial's dropout2d."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.conv2 = nn.Conv2d(32, 64, 3, 1)
        self.dropout1 = nn.Dropout2d(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x):
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = self.dropout1(F.max_pool2d(x, 2))
        x = self.dropout2(F.relu(self.fc1(torch.flatten(x, 1))))
        return F.log_softmax(self.fc2(x), dim=1)


def write_idx(path, magic, array):
    header = struct.pack(">I", magic) + b"".join(struct.pack(">I", n) for n in array.shape)
    path.write_bytes(header + array.astype(np.uint8).tobytes())


def write_images(folder):
    random = np.random.default_rng(7)
    patterns = random.integers(0, 100, (10, 28, 28))
    for name, count in (("train", 2000), ("t10k", 1000)):
        labels = random.integers(0, 10, count)
        images = patterns[labels] + random.integers(0, 156, (count, 28, 28))
        write_idx(folder / f"{name}-images-idx3-ubyte", 0x803, images)
        write_idx(folder / f"{name}-labels-idx1-ubyte", 0x801, labels)


def evaluate(folder, checkpoint):
    images = (folder / "t10k-images-idx3-ubyte").read_bytes()[16:]
    labels = (folder / "t10k-labels-idx1-ubyte").read_bytes()[8:]
    x = torch.frombuffer(bytearray(images), dtype=torch.uint8).view(-1, 1, 28, 28).float() / 255
    y = torch.frombuffer(bytearray(labels), dtype=torch.uint8).long()
    net = Net().eval()
    net.load_state_dict(load_file(checkpoint / "model.safetensors"), strict=True)
    with torch.no_grad():
        scores = net((x - MEAN) / STD)
    return {
        "accuracy": (scores.argmax(1) == y).float().mean().item(),
        "loss": F.nll_loss(scores, y).item(),
    }


def inspect(checkpoint):
    return {
        path.name: {name: list(tensor.shape) for name, tensor in load_file(path).items()}
        for path in sorted(checkpoint.glob("*.safetensors"))
    }


def main():
    command, *paths = sys.argv[1], *map(pathlib.Path, sys.argv[2:])
    if command == "images":
        write_images(*paths)
    else:
        print(json.dumps({"evaluate": evaluate, "inspect": inspect}[command](*paths)))


main()
