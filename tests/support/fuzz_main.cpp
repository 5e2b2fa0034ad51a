// Feeds LLVMFuzzerTestOneInput with random bytes from a fixed seed: the same inputs in every run.
// usage: fuzz_<name> [runs] [seed]
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

int main(int argc, char** argv) {
  const unsigned long runs = argc > 1 ? std::strtoul(argv[1], nullptr, 10) : 200'000;
  std::mt19937_64 random(argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1);
  std::vector<uint8_t> bytes;
  for (unsigned long run = 0; run < runs; ++run) {
    // Mostly short inputs, of small values in half of them: those get further into a decoder.
    const size_t size = random() % (run % 16 == 0 ? 4096 : 128);
    const bool small = run % 2 == 0;
    bytes.resize(size);
    for (uint8_t& byte : bytes) {
      const uint64_t bits = random();
      byte = static_cast<uint8_t>(small && (bits >> 8) % 8 != 0 ? bits % 4 : bits);
    }
    LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
  }
  std::printf("%lu random inputs\n", runs);
  return 0;
}
