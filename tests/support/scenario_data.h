// Small data sets for the tests of the scenarios; equal seeds give equal data.
#pragma once

#include <cstdint>
#include <string>

#include "distrain/base/random.h"
#include "scenario/pipeline/pipeline.h"
#include "scenario/rnn/rnn.h"
#include "support/files.h"

namespace distrain::testing {

/// Returns the content of a file in the IDX format, with elements of one byte.
inline std::string idx(uint8_t dimensions, std::initializer_list<int64_t> sizes,
                       const std::string& bytes) {
  std::string text = {0, 0, 8, static_cast<char>(dimensions)};
  for (const int64_t size : sizes) {
    for (int shift = 24; shift >= 0; shift -= 8) text += static_cast<char>(size >> shift);
  }
  return text + bytes;
}

/// Writes IDX files of 28 × 28 images in ten classes. The position of a bright bar shows the class.
inline void write_images(const testing::Folder& folder, int64_t train, int64_t test,
                         uint64_t seed) {
  base::Random random({seed});
  const auto write_set = [&](const std::string& name, int64_t count) {
    std::string pixels, labels;
    for (int64_t i = 0; i < count; ++i) {
      const auto label = static_cast<int64_t>(random.below(10));
      labels += static_cast<char>(label);
      for (int64_t pixel = 0; pixel < 28 * 28; ++pixel) {
        const bool bright = pixel / 28 / 2 == label + 2;
        pixels += static_cast<char>(random.below(100) + (bright ? 120 : 0));
      }
    }
    folder.write(name + "-images-idx3-ubyte", idx(3, {count, 28, 28}, pixels));
    folder.write(name + "-labels-idx1-ubyte", idx(1, {count}, labels));
  };
  write_set("train", train);
  if (test > 0) write_set("t10k", test);
}

/// Writes files in CIFAR-10's binary format with two classes: images with more red or more blue.
inline void write_cifar10(const testing::Folder& folder, int64_t train, int64_t test,
                          uint64_t seed) {
  base::Random random({seed});
  const auto write_file = [&](const std::string& name, int64_t count) {
    std::string text;
    for (int64_t i = 0; i < count; ++i) {
      const auto label = static_cast<int64_t>(random.below(2));
      text += static_cast<char>(label);
      for (int64_t byte = 0; byte < 3 * 1024; ++byte) {
        const bool bright = byte / 1024 == 2 * label;
        text += static_cast<char>(random.below(150) + (bright ? 60 : 0));
      }
    }
    folder.write(name, text);
  };
  for (int file = 1; file <= 5; ++file) {
    write_file("data_batch_" + std::to_string(file) + ".bin", train / 5);
  }
  write_file("test_batch.bin", test);
}

/// Returns lines of up to nine words out of thirty. Word i + 1 follows word i with probability 3/4.
inline std::string make_text(int lines, uint64_t seed) {
  base::Random random({seed});
  std::string text;
  uint64_t word = 0;
  for (int line = 0; line < lines; ++line) {
    for (uint64_t left = random.below(10); left > 0; --left) {
      word = random.below(4) > 0 ? (word + 1) % 30 : random.below(30);
      text += "w" + std::to_string(word) + (left > 1 ? " " : "");
    }
    text += "\n";
  }
  return text;
}

/// Two files of text, and options of jobs that train a language model.
struct RnnText {
  /// Returns options for 600 words: an epoch of 25 steps for one trainer, 13 for two, 9 for three.
  scenario::RnnOptions on_text() const {
    scenario::RnnOptions options;
    options.data = train;
    options.valid_data = valid;
    options.vocab_size = 25;  // some words are unknown
    options.batch_size = 4;
    options.bptt = 6;
    options.emsize = 6;
    options.nhid = 8;
    options.nlayers = 2;
    options.dropout = 0.2;
    options.lr = 2;
    options.lr_schedule = "plateau:0,0.25,0,0";
    options.mode = "sync";
    return options;
  }

  /// Returns options for the model of the PyTorch RPC tutorial, on random batches.
  static scenario::RnnOptions on_random() {
    scenario::RnnOptions options;
    options.mode = "sync";
    return options;
  }

  const Folder folder;
  const std::string train = folder.write("train.txt", make_text(120, 1));
  const std::string valid = folder.write("valid.txt", make_text(25, 2));
};

/// Returns examples in fastText's format over eighty words; some, even the last, may be empty.
inline std::string make_examples(int count) {
  std::string text;
  for (int i = 0; i < count; ++i) {
    text += std::string("__label__") + "abc"[i % 3];
    for (int k = 0; k < i % 7; ++k) {
      text += " w" + std::to_string((i * 13 + k * 29 + (i % 3) * 7) % 80);
    }
    text += "\n";
  }
  return text;
}

/// Returns options of a quick pipeline job. The model reduces a 33 x 33 image to 2 x 2 values per
/// channel, because batch norm needs more than one.
inline scenario::PipelineOptions small_pipeline(int64_t batches, int64_t batch_size) {
  scenario::PipelineOptions options;
  options.model = "narrow_resnet18";
  options.batches = batches;
  options.batch_size = batch_size;
  options.image_size = 33;
  options.classes = 10;
  return options;
}

}  // namespace distrain::testing
