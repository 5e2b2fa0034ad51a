#pragma once

#include <string>

#include "distrain/data/idx.h"

namespace distrain::data {

/// Returns true if `folder` or its `cifar-10-batches-bin` has any of data_batch_1.bin to _5.bin.
bool has_cifar10(const std::string& folder);

/// Reads the binary version of CIFAR-10 (cs.toronto.edu/~kriz/cifar.html): data_batch_1.bin to
/// _5.bin for training and test_batch.bin, if it exists, from `folder` or its
/// `cifar-10-batches-bin`; each plain or gzip. A record is a label from 0 to 9 and the red, green
/// and blue planes of 32 x 32 bytes. Throws `bad_data`, with the file and the reason, for a
/// missing, unreadable, damaged or empty file, a partial record, another label, and more than 8
/// GiB.
ImageFolder read_cifar10(const std::string& folder);

/// Reads a file or pipe of records, or the test_batch.bin of a folder. Throws as read_cifar10().
ImageSet read_cifar10_images(const std::string& path);

}  // namespace distrain::data
