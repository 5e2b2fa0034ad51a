#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

#include "distrain/store/open_folder.h"

namespace distrain::store {

inline constexpr const char* kManifestName = "manifest.json";
inline constexpr size_t kMaxManifestBytes = size_t{64} << 20;
inline constexpr int64_t kMaxCheckpointStep = 999'999'999'999;  // twelve digits

/// The content of manifest.json: see checkpoint_store.h.
struct Manifest {
  struct File {
    uint64_t bytes = 0;
    uint64_t hash = 0;
  };
  int64_t generation = 0;  ///< of the saving job: Note [One job saves in a folder]
  int64_t step = 0;
  std::map<std::string, File> files;
  nlohmann::ordered_json state = nlohmann::ordered_json::object();
};

/// Throws `invalid` for a manifest that parse_manifest would refuse.
std::string manifest_text(const Manifest& manifest);

/// Throws `bad_data`; error messages show `path`.
Manifest parse_manifest(std::string_view text, const std::string& path);

/// Reads the manifest of a checkpoint. Throws `bad_data`.
Manifest read_manifest(const OpenFolder& checkpoint);

}  // namespace distrain::store
