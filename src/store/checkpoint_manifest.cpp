#include <algorithm>
#include <initializer_list>
#include <vector>

#include <fmt/format.h>

#include "checkpoint_folder.h"
#include "distrain/base/error.h"
#include "distrain/base/text.h"
#include "distrain/store/file.h"
#include "distrain/store/hash.h"

namespace distrain::store {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kFormat = "distrain-checkpoint";
constexpr const char* kGeneration = "generation";  // missing in manifests of older versions
constexpr size_t kMaxBytes = size_t{64} << 20;
constexpr int64_t kMaxStep = 999'999'999'999;  // twelve digits; also limits the generation
constexpr size_t kMaxDepth = 64;
// Limits the keys of an object, because each insertion into an ordered_json takes linear time.
constexpr size_t kMaxKeys = 4096;
constexpr size_t kMaxFileName = 255;

std::string hex(uint64_t hash) { return fmt::format("{:016x}", hash); }

// Returns the end of a manifest that begins with `text`: the hash of `text`, by which a parser
// detects a change of any byte.
std::string hash_of(std::string_view text) {
  return fmt::format(",\"xxh64\":\"{}\"}}\n", hex(content_hash(text)));
}

class Parser {
 public:
  explicit Parser(const std::string& path) : path_(path) {}

  Manifest parse(std::string_view text) const {
    if (text.size() > kMaxBytes) fail("more than 64 MiB");
    const size_t end = hash_of("").size();
    if (text.size() < end) fail("cut short");
    const std::string_view begin = text.substr(0, text.size() - end);
    if (text.substr(begin.size()) != hash_of(begin)) {
      fail("damaged: it does not end with the xxh64 of its text");
    }
    const Json json = parse_json(text);
    check_keys(json, "the manifest", {"format", "version", "step", "files", "state", "xxh64"},
               json.contains(kGeneration) ? 1 : 0);
    if (json["format"] != kFormat) fail("not the manifest of a checkpoint");
    const auto version = number(json["version"], "version");
    if (version != 1) fail("of version " + std::to_string(version) + ", this program reads 1");
    Manifest manifest;
    manifest.hash = content_hash(begin);
    if (json.contains(kGeneration)) {
      manifest.generation = number(json[kGeneration], kGeneration, kMaxStep);
    }
    manifest.step = number(json["step"], "step", kMaxStep);
    if (!json["files"].is_object()) fail("'files' is not an object");
    for (const auto& [name, file] : json["files"].items()) {
      manifest.files.emplace(name, parse_file(name, file));
    }
    if (!json["state"].is_object()) fail("'state' is not an object");
    manifest.state = json["state"];
    return manifest;
  }

 private:
  Json parse_json(std::string_view text) const {
    // Refuses a byte order mark, which the JSON parser would skip, and a NUL, where it would stop.
    if (!text.starts_with('{') || text.find('\0') != std::string_view::npos) fail("not JSON");
    std::vector<std::set<std::string>> open;  // keys seen in each open object or array
    const auto look = [&](int, Json::parse_event_t event, Json& value) {
      using Event = Json::parse_event_t;
      if (event == Event::object_start || event == Event::array_start) {
        open.emplace_back();
        if (open.size() > kMaxDepth) fail("nested too deep");
      } else if (event == Event::object_end || event == Event::array_end) {
        open.pop_back();
      } else if (event == Event::key) {
        const auto& key = value.get_ref<const std::string&>();
        if (!open.back().insert(key).second) fail(base::in_quotes(key) + " is there twice");
        if (open.back().size() > kMaxKeys) fail("an object with too many keys");
      }
      return true;
    };
    try {
      return Json::parse(text.begin(), text.end(), look);
    } catch (const Json::exception&) {
      fail("not JSON");
    }
  }

  void check_keys(const Json& object, const std::string& what,
                  std::initializer_list<const char*> keys, size_t others = 0) const {
    if (!object.is_object()) fail(what + " is not an object");
    for (const char* key : keys) {
      if (!object.contains(key)) fail(what + " has no '" + key + "'");
    }
    if (object.size() != keys.size() + others) fail(what + " has a key that is not in the format");
  }

  int64_t number(const Json& value, const std::string& what, int64_t most = INT64_MAX) const {
    if (!value.is_number_unsigned() || value.get<uint64_t>() > static_cast<uint64_t>(INT64_MAX)) {
      fail("'" + what + "' is not a number from 0 on");
    }
    if (value.get<int64_t>() > most) fail("'" + what + "' is too large");
    return value.get<int64_t>();
  }

  // Accepts only plain names, so that no file outside of the checkpoint is opened.
  FileSum parse_file(const std::string& name, const Json& file) const {
    const std::string what = "file " + base::in_quotes(name);
    const bool plain = std::ranges::none_of(
        name, [](unsigned char c) { return c == '/' || c < 0x20 || c == 0x7F; });
    if (!plain || name.empty() || name.front() == '.' || name.size() > kMaxFileName ||
        name == kManifestName) {
      fail(what + " has a name that files of a checkpoint cannot have");
    }
    check_keys(file, what, {"bytes", "xxh64"});
    const auto bytes = static_cast<uint64_t>(number(file["bytes"], "bytes"));
    if (!file["xxh64"].is_string()) fail(what + " has no hash");
    const auto& digits = file["xxh64"].get_ref<const std::string&>();
    const uint64_t hash = std::strtoull(digits.c_str(), nullptr, 16);
    if (hex(hash) != digits) fail(what + " has no hash");
    return {bytes, hash};
  }

  [[noreturn]] void fail(const std::string& reason) const { base::bad_data(path_ + ": " + reason); }

  const std::string& path_;
};

}  // namespace

std::string manifest_text(const Manifest& manifest) {
  try {
    Json files = Json::object();
    for (const auto& [name, file] : manifest.files) {
      files[name] = {{"bytes", file.bytes}, {"xxh64", hex(file.hash)}};
    }
    const Json json{{"format", kFormat},     {"version", 1},   {kGeneration, manifest.generation},
                    {"step", manifest.step}, {"files", files}, {"state", manifest.state}};
    std::string text = json.dump();
    text.pop_back();  // '}'
    text += hash_of(text);
    parse_manifest(text, "a checkpoint that cannot be saved");
    return text;
  } catch (const Json::exception&) {
    base::invalid("a checkpoint that cannot be saved: text that is not UTF-8");
  } catch (const base::Exception& exception) {
    base::invalid(exception.error().message);
  }
}

Manifest parse_manifest(std::string_view text, const std::string& path) {
  return Parser(path).parse(text);
}

Manifest read_manifest(const OpenFolder& checkpoint) {
  InputFile file(checkpoint, kManifestName);
  return parse_manifest(read_to_end<std::string>(file, kMaxBytes), file.path());
}

}  // namespace distrain::store
