#pragma once

#include <string>

#include "distrain/data/idx.h"

namespace distrain::data {

/// Whether `folder`, or `cifar-10-batches-bin` in it, has any of data_batch_1.bin to _5.bin.
bool has_cifar10(const std::string& folder);

/// Reads CIFAR-10's binary version (cs.toronto.edu/~kriz/cifar.html): data_batch_1.bin to
/// data_batch_5.bin to train with, and test_batch.bin if it is there, from `folder` or from
/// `cifar-10-batches-bin` in it; each plain or gzip. A record is a label of 0 to 9 and the red,
/// green and blue planes of 32 x 32 bytes. Throws `bad_data`, with the file and the reason:
/// missing, unreadable, damaged, empty, not whole records, other labels, more than 8 GiB.
ImageFolder read_cifar10(const std::string& folder);

/// Images to look at: a file or pipe of such records, or a folder's test_batch.bin. Throws alike.
ImageSet read_cifar10_images(const std::string& path);

}  // namespace distrain::data
