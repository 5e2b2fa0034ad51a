// Runs a fuzz target without libFuzzer. The inputs are the target's seeds and the named files,
// unchanged and mutated, and random bytes. They are the same in each run.
// usage: fuzz_<program> --target=NAME [--runs=N] [--seed=N] [file or folder...]
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "../fuzz/target.h"

extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv);

namespace {

using distrain::fuzz::Bytes;
using Random = std::mt19937_64;

constexpr size_t kLongest = 1 << 16;

void read_files(const std::filesystem::path& path, std::vector<Bytes>& inputs) {
  std::vector<std::filesystem::path> files;
  if (std::filesystem::is_directory(path)) {
    for (const auto& entry : std::filesystem::directory_iterator(path)) {
      files.push_back(entry.path());
    }
    std::sort(files.begin(), files.end());  // the same order on every machine
  } else {
    files.push_back(path);
  }
  for (const auto& file : files) {
    std::ifstream in(file, std::ios::binary);
    if (!in) {
      std::perror(file.c_str());
      std::exit(2);
    }
    inputs.emplace_back(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
  }
}

// Returns mostly short inputs. Half have mostly small byte values, which a decoder rarely rejects.
Bytes random_bytes(Random& random) {
  const bool small = random() % 2 == 0;
  Bytes bytes(random() % (random() % 16 == 0 ? 4096 : 128));
  for (uint8_t& byte : bytes) {
    const uint64_t bits = random();
    byte = static_cast<uint8_t>(small && (bits >> 8) % 8 != 0 ? bits % 4 : bits);
  }
  return bytes;
}

// Returns a number that is likely to be an edge case if a decoder takes it for a length or a count.
uint64_t odd_number(Random& random) {
  const uint64_t power = uint64_t{1} << random() % 64;
  switch (random() % 4) {
    case 0:
      return random() % 16;
    case 1:
      return power;
    case 2:
      return power - 1;
    default:
      return 0 - power;
  }
}

void mutate(Bytes& bytes, const std::vector<Bytes>& others, Random& random) {
  const size_t size = bytes.size();
  const size_t at = size == 0 ? 0 : random() % size;
  const size_t length = size == 0 ? 0 : random() % std::min<size_t>(size - at + 1, 32);
  const auto place = [&bytes](size_t i) { return bytes.begin() + static_cast<ptrdiff_t>(i); };
  switch (random() % 7) {
    case 0:
      if (size > 0) bytes[at] = static_cast<uint8_t>(bytes[at] ^ 1u << random() % 8);
      return;
    case 1:
      if (size > 0) bytes[at] = static_cast<uint8_t>(random());
      return;
    case 2: {  // writes a number, little-endian
      const uint64_t number = odd_number(random);
      std::memcpy(bytes.data() + at, &number, std::min<size_t>(size - at, 1u << random() % 4));
      return;
    }
    case 3:
      bytes.erase(place(at), place(at + length));
      return;
    case 4: {
      Bytes more = random_bytes(random);
      more.resize(std::min<size_t>(more.size(), 32));
      bytes.insert(place(at), more.begin(), more.end());
      return;
    }
    case 5: {  // repeats a piece
      const Bytes piece(place(at), place(at + length));
      bytes.insert(place(size == 0 ? 0 : random() % size), piece.begin(), piece.end());
      return;
    }
    default: {  // appends the end of another input
      const Bytes& other = others[random() % others.size()];
      const size_t from = std::min(at, other.size());
      bytes.resize(at);
      bytes.insert(bytes.end(), other.begin() + static_cast<ptrdiff_t>(from), other.end());
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  LLVMFuzzerInitialize(&argc, &argv);
  const distrain::fuzz::Target& target = distrain::fuzz::chosen_target();
  unsigned long runs = 10'000;
  Random random(1);
  std::vector<Bytes> inputs = target.seeds();
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (argument.starts_with("--runs=")) {
      runs = std::strtoul(argv[i] + 7, nullptr, 10);
    } else if (argument.starts_with("--seed=")) {
      random.seed(std::strtoull(argv[i] + 7, nullptr, 10));
    } else if (!argument.starts_with("-")) {
      read_files(argument, inputs);
    }
  }
  for (const Bytes& input : inputs) target.run(input);
  for (unsigned long run = 0; run < runs; ++run) {
    Bytes bytes = random_bytes(random);
    if (run % 8 != 0) {
      bytes = inputs[random() % inputs.size()];
      for (size_t changes = 1 + random() % 6; changes > 0; --changes) {
        mutate(bytes, inputs, random);
      }
      if (bytes.size() > kLongest) bytes.resize(kLongest);
    }
    target.run(bytes);
  }
  std::printf("%zu inputs as they are, %lu at random\n", inputs.size(), runs);
  return 0;
}
