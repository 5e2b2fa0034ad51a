"""Records torchvision's ResNets, to test those of distrain.

usage: resnet.py record            prints tests/oracle/torchvision_recorded.h
       resnet.py export <folder>   writes resnet50's random weights, an input and what comes of it
"""
import math
import pathlib
import sys

import numpy as np
import torch
import torch.nn.functional as F
import torchvision
from safetensors.torch import save_file

CLASSES = 10
NORMS = ("conv1.weight", "layer1.0.bn1.bias", "layer3.0.downsample.0.weight", "fc.bias")


def fnv1a(text):
    value = 0xCBF29CE484222325
    for byte in text.encode():
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return value


def numbers(name, shape):
    """Returns numbers in [-1, 1) that C++ reproduces bit by bit: murmur3's mix of name and index."""
    x = np.arange(math.prod(shape), dtype=np.uint32) * np.uint32(0x9E3779B1)
    x += np.uint32(fnv1a(name) >> 32)
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    x ^= x >> 16
    values = (x >> 8).astype(np.float32) * np.float32(2.0**-23) - np.float32(1)
    return torch.from_numpy(values).view(shape)


def made_up(name, shape):
    """Returns weights that keep activations near 1."""
    if name.endswith("num_batches_tracked"):
        return torch.zeros((), dtype=torch.long)
    u = numbers(name, tuple(shape))
    if len(shape) > 1:  # He's bound by the fan in
        return u * np.float32(math.sqrt(6 / math.prod(shape[1:])))
    if name.endswith("running_var"):
        return u * 0.25 + 1
    if name.endswith("weight"):
        return u * 0.25 + 0.5
    return u * 0.25


def hashed(tensors):
    return fnv1a("".join(f"{name} {list(t.shape)}\n" for name, t in tensors).replace(" ", ""))


def loss_gradients(model, output, labels):
    loss = F.cross_entropy(output, labels)
    names, parameters = zip(*model.named_parameters())
    return dict(zip(names, torch.autograd.grad(loss, parameters)))


def record_one(name):
    model = torchvision.models.get_model(name, weights=None, num_classes=CLASSES)
    state = {key: made_up(key, value.shape) for key, value in model.state_dict().items()}
    model.load_state_dict(state)
    model.double()  # float32's rounding, which training amplifies, is not to be recorded
    images = numbers("images", (2, 3, 64, 64)).double()
    evaluated = model.eval()(images).detach()
    trained = model.train()(images)
    gradients = loss_gradients(model, trained, torch.tensor([3, 7]))
    running = [float(b.double().abs().sum()) for n, b in model.named_buffers() if "running" in n]

    def row(values):
        return "{" + ", ".join(f"{float(v):.8g}" for v in values) + "}"

    parameters, buffers = list(model.named_parameters()), list(model.named_buffers())
    return f"""    {{"{name}",
     {len(parameters)},
     {hashed(parameters):#x},
     {len(buffers)},
     {hashed(buffers):#x},
     {row(evaluated.flatten())},
     {row(trained.detach().flatten())},
     {row(gradients[n].norm() for n in NORMS)},
     {sum(running):.8g}}},
"""


def record():
    names = ", ".join(f'"{n}"' for n in NORMS)
    print(
        f"""// What torchvision {torchvision.__version__.split("+")[0]} gives; printed by tests/python/resnet.py record.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace distrain::oracle {{

struct RecordedResNet {{
  const char* model;
  size_t parameters;
  uint64_t parameters_hash;  ///< FNV-1a of "name[sizes]\\n" of each, in order, without blanks
  size_t buffers;
  uint64_t buffers_hash;
  std::vector<double> evaluated;  ///< scores [2, {CLASSES}] of two images of 64 x 64
  std::vector<double> trained;
  std::vector<double> gradient_norms;  ///< of kGradientNames, cross entropy against 3 and 7
  double running_sum;                  ///< of |running statistics|, after the training pass
}};

inline constexpr const char* kGradientNames[] = {{{names}}};

inline const RecordedResNet kRecordedResNets[] = {{
{record_one("resnet18")}{record_one("resnet50")}}};

}}  // namespace distrain::oracle"""
    )


def export(folder):
    """Records scores in float32, and gradients and running statistics in float64: in float32 those differ by some
    percent with the order of summation, through batch norm and ReLU."""
    torch.manual_seed(1)
    model = torchvision.models.resnet50(weights=None)
    with torch.no_grad():  # running statistics that are not the initial ones
        for _ in range(20):
            model.train()(torch.randn(8, 3, 96, 96))
    save_file(model.state_dict(), folder / "weights.safetensors")
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    images, labels = torch.randn(16, 3, 96, 96), torch.randint(1000, (16,))
    result = {"images": images, "labels": labels}
    result["evaluated"] = model.eval()(images).detach()
    result["trained"] = model.train()(images).detach()
    model.load_state_dict(start)
    model.double()
    for name, gradient in loss_gradients(model, model(images[:4].double()), labels[:4]).items():
        result["gradient." + name] = gradient.contiguous()
    for name, buffer in model.named_buffers():
        result["buffer." + name] = buffer
    save_file(result, folder / "pass.safetensors")


def main():
    if sys.argv[1] == "record":
        record()
    else:
        export(pathlib.Path(sys.argv[2]))


main()
