// The entry points that libFuzzer and fuzz_main.cpp call, for the target that --target=NAME names.
// --write-seeds=FOLDER writes the target's seeds instead.
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>

#include "../fuzz/target.h"
#include "support/heap_use.h"

namespace distrain::fuzz {

void check(bool holds, const char* promise) {
  if (holds) return;
  std::fprintf(stderr, "does not hold: %s\n", promise);
  std::abort();
}

MemoryLimit::MemoryLimit(size_t limit, const char* why) : limit_(limit), why_(why) {
  support::begin_heap_use();
}

MemoryLimit::~MemoryLimit() {
  const size_t most = support::end_heap_use();
  if (most <= limit_) return;
  std::fprintf(stderr, "%zu bytes of memory at a time, where %zu are allowed: %s\n", most, limit_,
               why_);
  std::abort();
}

namespace {

const Target* chosen = nullptr;

void write_seeds(const std::string& folder) {
  std::filesystem::create_directories(folder);
  int number = 0;
  for (const Bytes& seed : chosen->seeds()) {
    std::ofstream file(folder + "/seed" + std::to_string(number++), std::ios::binary);
    file.write(reinterpret_cast<const char*>(seed.data()),
               static_cast<std::streamsize>(seed.size()));
    if (!file.flush()) {
      std::perror(folder.c_str());
      std::exit(1);
    }
  }
}

void choose(std::span<char* const> arguments) {
  std::string_view name;
  std::string folder;
  for (const std::string_view argument : arguments) {
    if (argument.starts_with("--target=")) name = argument.substr(9);
    if (argument.starts_with("--write-seeds=")) folder = argument.substr(14);
  }
  std::string names;
  for (const Target& target : targets()) {
    if (target.name == name) chosen = &target;
    names.append(" ").append(target.name);
  }
  if (!chosen) {
    std::fprintf(stderr, "which --target=?%s\n", names.c_str());
    std::exit(2);
  }
  if (!folder.empty()) {
    write_seeds(folder);
    std::exit(0);
  }
}

}  // namespace

const Target& chosen_target() { return *chosen; }

}  // namespace distrain::fuzz

// Reads our options, which libFuzzer ignores because they begin with two dashes.
extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
  distrain::fuzz::choose({*argv, static_cast<size_t>(*argc)});
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  distrain::fuzz::chosen_target().run({data, size});
  return 0;
}
