// Shared helpers of the tests of checkpoints.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <string>
#include <vector>

#include <ATen/Functions.h>

#include "distrain/store/checkpoint_store.h"
#include "distrain/store/hash.h"
#include "support/catch.h"
#include "support/files.h"
#include "support/tensor_infos.h"

namespace distrain::store {

using namespace testing;

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;
using Strings = std::vector<std::string>;

// The content of a checkpoint.
struct Checkpoint {
  int64_t step = 0;
  std::map<std::string, rpc::NamedTensors> files;  // the tensors are contiguous, on the CPU
  Json state = Json::object();
};

// Writes a checkpoint and returns its path.
inline std::string save(CheckpointStore& store, const Checkpoint& checkpoint) {
  const auto saving = store.begin(checkpoint.step, checkpoint.state);
  for (const auto& [name, tensors] : checkpoint.files) {
    std::vector<TensorInfo> infos = infos_of(tensors);
    OutputFile file = saving->create(name, infos);
    for (const TensorInfo& info : infos) {
      const void* const data = tensors.at(info.name).const_data_ptr();
      file.write_at(info.offset, {static_cast<const uint8_t*>(data), info.bytes});
    }
    saving->add(name, file);
  }
  return saving->commit();
}
inline std::string save(CheckpointStore&& store, const Checkpoint& checkpoint) {
  return save(store, checkpoint);
}

// A checkpoint whose contents are derived from its step and version.
struct Sample {
  explicit Sample(int64_t step, int version = 0, int64_t size = 5) {
    const at::Tensor weights = at::full({size}, (16 * step + version) % 256, at::kByte);
    checkpoint.step = step;
    checkpoint.state["version"] = version;
    checkpoint.state["rng"] = Json::array({UINT64_MAX, 0.1, "é\"\n", nullptr, -3});
    checkpoint.files["model.safetensors"] = {{"bias", weights.narrow(0, 0, 2)}, {"w", weights}};
    checkpoint.files["optimizer.safetensors"] = {};
  }

  Checkpoint checkpoint;
};

inline void check_same(const LoadedCheckpoint& loaded, const Checkpoint& expected) {
  REQUIRE(loaded.step == expected.step);
  REQUIRE(loaded.state == expected.state);
  REQUIRE(loaded.files.size() == expected.files.size());
  for (const auto& [name, tensors] : expected.files) {
    REQUIRE(loaded.files.contains(name));
    const auto& read = loaded.files.at(name);
    REQUIRE(read.tensors().size() == tensors.size());
    for (const auto& [key, tensor] : tensors) {
      REQUIRE(read.tensors().contains(key));
      REQUIRE(at::equal(read.tensor(key), tensor));
    }
  }
}

inline void check_newest(const std::string& folder, const Sample& expected) {
  const auto path = CheckpointStore::newest(folder);
  REQUIRE(path);
  check_same(CheckpointStore::load(*path), expected.checkpoint);
}

// Returns the manifest that consists of `text` and the checksum that ends a valid manifest.
inline std::string sealed(const std::string& text) {
  char digits[17];
  std::snprintf(digits, sizeof digits, "%016llx",
                static_cast<unsigned long long>(content_hash(text)));
  return text + ",\"xxh64\":\"" + digits + "\"}\n";
}

inline std::string step_name(int64_t step) {
  const std::string digits = std::to_string(step);
  return "step-" + std::string(12 - digits.size(), '0') + digits;
}

// Returns the sorted names in `folder` without the lock file, which saves never remove.
inline Strings names_in(const std::string& folder) {
  Strings names;
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (entry.path().filename() != ".lock") names.push_back(entry.path().filename());
  }
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace distrain::store
