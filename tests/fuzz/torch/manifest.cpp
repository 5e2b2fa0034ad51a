#include <cstdio>
#include <string>

#include "../src/store/checkpoint_folder.h"
#include "distrain/base/error.h"
#include "distrain/store/hash.h"
#include "targets.h"

namespace distrain::fuzz {

namespace {

using store::Manifest;

// Parses a manifest. If it is valid, checks that saving it and parsing it again changes nothing.
void parse_text(std::string_view text) {
  // A JSON value of two bytes needs dozens of bytes once parsed, and two parsed copies coexist.
  const MemoryLimit limit(kSmall + 256 * text.size(), "a multiple of the text");
  try {
    const Manifest manifest = store::parse_manifest(text, "fuzz");
    for (const auto& [name, file] : manifest.files) {
      check(!name.empty() && name.front() != '.' && name.find('/') == std::string::npos,
            "a checkpoint's files are in its folder");
    }
    const std::string saved = store::manifest_text(manifest);
    check(store::manifest_text(store::parse_manifest(saved, "fuzz")) == saved,
          "a saved manifest is read as saved");
  } catch (const base::Exception& e) {
    check(e.kind() == base::ErrorKind::kBadData, "what does not fit is refused as 'bad_data'");
  }
}

// Appends to `text` its hash and the closing '}', as the format requires.
std::string with_hash(std::string text) {
  char end[40];
  std::snprintf(end, sizeof end, ",\"xxh64\":\"%016llx\"}\n",
                static_cast<unsigned long long>(store::content_hash(text)));
  return text + end;
}

// Parses the input as a whole manifest. Then appends the right hash and parses it again.
void run_manifest(Input input) {
  const std::string text(input.begin(), input.end());
  parse_text(text);
  parse_text(with_hash(text));
}

std::vector<Bytes> manifest_seeds() {
  Manifest manifest;
  manifest.step = 400;
  manifest.files["net.safetensors"] = {120, 0x0123456789abcdef};
  manifest.files["vocabulary"] = {0, 1};
  manifest.state = {{"epoch", 3},
                    {"lr", 0.1},
                    {"names", {"a", "b"}},
                    {"none", nullptr},
                    {"nested", {{"\u00e4", {{"deep", -1}}}, {"yes", true}}}};
  std::vector<Bytes> seeds;
  for (const Manifest& each : {manifest, Manifest()}) {
    const std::string text = store::manifest_text(each);
    const std::string begin = text.substr(0, text.rfind(",\"xxh64\""));
    check(with_hash(begin) == text, "a manifest ends with its hash");
    seeds.emplace_back(begin.begin(), begin.end());
  }
  return seeds;
}

}  // namespace

const Target kManifest{"manifest", run_manifest, manifest_seeds};

}  // namespace distrain::fuzz
