// ctest: timeout=120
#include <cstdio>
#include <functional>
#include <optional>
#include <string>

#include <sys/stat.h>

#include "checkpoint_sample.h"
#include "distrain/store/checkpoint_store.h"
#include "distrain/store/hash.h"
#include "support/catch.h"

namespace distrain::store {
namespace {

std::string not_saved(const std::string& folder, const Checkpoint& checkpoint) {
  return error_of(base::ErrorKind::kInvalid, [&] { save(CheckpointStore(folder), checkpoint); });
}

std::string no_resources(const std::function<void()>& call) {
  return error_of(base::ErrorKind::kResources, call);
}

}  // namespace

TEST_CASE("A saved checkpoint is loaded") {
  const Folder folder;
  CheckpointStore store(folder.path());
  store.prepare();
  CHECK(names_in(folder.path()).empty());
  const Sample sample(20);
  const auto path = save(store, sample.checkpoint);
  CHECK(path == folder.path("step-000000000020"));
  CHECK(names_in(folder.path()) == Strings{"step-000000000020"});
  CHECK(names_in(path) == Strings{"manifest.json", "model.safetensors", "optimizer.safetensors"});
  CHECK(CheckpointStore::newest(folder.path()) == path);
  for (const auto& from : {path, folder.path(), path + "/"}) {
    const auto loaded = CheckpointStore::load(from);
    CHECK(fs::path(loaded.path).lexically_normal().string().starts_with(path));
    check_same(loaded, sample.checkpoint);
  }
  // A copy of a LoadedCheckpoint keeps the bytes alive after the original is destroyed.
  std::optional<LoadedCheckpoint> first = CheckpointStore::load(path);
  const LoadedCheckpoint copy = *first;
  first.reset();
  check_same(copy, sample.checkpoint);
}

TEST_CASE("A checkpoint of many megabytes and an empty one are loaded") {
  const Folder folder;
  CheckpointStore store(folder.path());
  const Sample large(1, 0, 9'000'001);
  check_same(CheckpointStore::load(save(store, large.checkpoint)), large.checkpoint);
  const Checkpoint none;
  check_same(CheckpointStore::load(save(store, none)), none);
  Checkpoint last;
  last.step = 999'999'999'999;
  check_same(CheckpointStore::load(save(store, last)), last);
}

TEST_CASE("If the newest checkpoint is damaged, an older intact one is named") {
  const Folder folder;
  CheckpointStore store(folder.path(), {}, 3);
  for (int64_t step = 7; step < 10; ++step) save(store, Sample(step).checkpoint);
  CHECK(CheckpointStore::load(folder.path(), Depth::kManifest).state == Sample(9).checkpoint.state);
  const auto before = [&](const std::string& name) {
    return CheckpointStore::intact_before(folder.path(name));
  };
  CHECK(before("") == folder.path(step_name(8)));
  CHECK(before(step_name(9) + "/") == folder.path(step_name(8)));
  folder.write(step_name(8) + "/model.safetensors", "");
  CHECK(before(step_name(9)) == folder.path(step_name(7)));
  CHECK_FALSE(before(step_name(7)));
  CHECK_FALSE(before(step_name(10)));
  CHECK_FALSE(CheckpointStore::intact_before("/nowhere"));
}

TEST_CASE("The requested number of checkpoints is kept") {
  const Folder folder;
  const int64_t keep = GENERATE(1, 3);
  CheckpointStore store(folder.path(), {}, keep);
  for (int64_t step = 7; step < 12; ++step) save(store, Sample(step).checkpoint);
  Strings expected;
  for (int64_t step = 12 - keep; step < 12; ++step) expected.push_back(step_name(step));
  CHECK(names_in(folder.path()) == expected);
}

TEST_CASE("By default the newest two are kept") {
  const Folder folder;
  CheckpointStore store(folder.path());
  for (int64_t step = 7; step < 12; ++step) save(store, Sample(step).checkpoint);
  CHECK(names_in(folder.path()) == Strings{step_name(10), step_name(11)});
  check_newest(folder.path(), Sample(11));
  // No save removes a newer checkpoint.
  for (const int64_t step : {7, 8, 9}) save(store, Sample(step).checkpoint);
  CHECK(names_in(folder.path()) ==
        Strings{step_name(8), step_name(9), step_name(10), step_name(11)});
  check_newest(folder.path(), Sample(11));
}

TEST_CASE("Saving a step again replaces it") {
  const Folder folder;
  CheckpointStore store(folder.path());
  save(store, Sample(1).checkpoint);
  for (int version = 0; version < 3; ++version) {
    save(store, Sample(2, version).checkpoint);
    check_newest(folder.path(), Sample(2, version));
    CHECK(names_in(folder.path()) == Strings{step_name(1), step_name(2)});
  }
}

TEST_CASE("Other things in the folder are left alone") {
  const Folder folder;
  CheckpointStore store(folder.path());
  const Strings others = {".tmp-mine",          "notes.txt",         "step-12",
                          "step-0000000000020", "step-00000000002x", "xstep-000000000020"};
  for (const auto& name : others) fs::create_directory(folder.path(name));
  fs::create_directories(folder.path(".tmp-step-000000000001"));
  folder.write(".tmp-step-000000000001/model.safetensors", "half");
  fs::create_directories(folder.path(".old-step-000000000002"));
  CHECK(!CheckpointStore::newest(folder.path()));
  for (int64_t step = 1; step < 5; ++step) save(store, Sample(step).checkpoint);
  Strings expected = others;
  expected.insert(expected.end(), {step_name(3), step_name(4)});
  std::sort(expected.begin(), expected.end());
  CHECK(names_in(folder.path()) == expected);
  folder.write("step-000000000009", "a file");
  check_newest(folder.path(), Sample(4));
}

TEST_CASE("A folder that cannot be created or written is reported before training") {
  const Folder folder;
  const auto deep = folder.path("a/b/c");
  CheckpointStore(deep).prepare();
  CheckpointStore(deep + "/").prepare();
  CHECK(names_in(deep).empty());
  fs::create_directory(deep + "/.tmp-step-000000000000");
  write_text(deep + "/.tmp-step-000000000000/trial", "left over");
  CheckpointStore(deep).prepare();
  CHECK(names_in(deep).empty());

  const auto file = folder.write("file", "x");
  CHECK(no_resources([&] { CheckpointStore(file).prepare(); }) ==
        "cannot open " + file + ": Not a directory");
  CHECK(no_resources([&] { CheckpointStore(file + "/x").prepare(); }) ==
        "cannot open " + file + "/x: Not a directory");
  CHECK(no_resources([&] {
          CheckpointStore("/proc/nothing/x").prepare();
        }).starts_with("cannot create the folder /proc/nothing: "));
  CHECK(no_resources([&] {
          CheckpointStore("/proc").prepare();
        }).starts_with("cannot create /proc/.lock: "));
  no_resources([&] { CheckpointStore("").prepare(); });

  const auto missing = folder.path("missing");
  CHECK(no_resources([&] { save(CheckpointStore(missing), Sample(1).checkpoint); }) ==
        "cannot open " + missing + ": No such file or directory");
  CHECK(no_resources([&] { save(CheckpointStore(file), Sample(1).checkpoint); }) ==
        "cannot open " + file + ": Not a directory");
}

TEST_CASE("A checkpoint that could not be loaded is not saved") {
  const Folder folder;
  Checkpoint good = Sample(1).checkpoint;
  for (const std::string name :
       {"", ".hidden", "..", "a/b", "/a", "manifest.json", "a\nb", "\xFF"}) {
    Checkpoint bad = good;
    bad.files[name] = {};
    CHECK(not_saved(folder.path(), bad).starts_with("a checkpoint that cannot be saved: "));
  }
  for (const int64_t step : {int64_t{-1}, int64_t{1'000'000'000'000}, INT64_MIN, INT64_MAX}) {
    Checkpoint bad = good;
    bad.step = step;
    CHECK(not_saved(folder.path(), bad).find("'step'") != std::string::npos);
  }
  Checkpoint bad = good;
  bad.state = Json::array();
  CHECK(not_saved(folder.path(), bad).ends_with("'state' is not an object"));
  bad.state = {{"a", "\xFF"}};
  CHECK(not_saved(folder.path(), bad).ends_with("text that is not UTF-8"));
  bad.state = {{"a", std::string(65 << 20, 'x')}};
  CHECK(not_saved(folder.path(), bad).ends_with("more than 64 MiB"));
  bad.state = Json::object();
  Json deep = 1;
  for (int i = 0; i < 64; ++i) deep = Json::array({deep});
  bad.state["a"] = deep;
  CHECK(not_saved(folder.path(), bad).ends_with("nested too deep"));
  bad = good;
  bad.files["model.safetensors"]["w"] = at::empty({1}, at::kComplexDouble);
  not_saved(folder.path(), bad);
  CHECK(names_in(folder.path()).empty());
}

TEST_CASE("A missing checkpoint is reported") {
  const Folder folder;
  const auto missing = folder.path("missing");
  CHECK(!CheckpointStore::newest(missing));
  CHECK(!CheckpointStore::newest(folder.path()));
  CHECK(bad_data([&] { CheckpointStore::load(missing); }) ==
        "cannot open " + missing + ": No such file or directory");
  CHECK(bad_data([&] { CheckpointStore::load(folder.path()); }) ==
        folder.path() + ": no checkpoint in this folder");
  const auto file = folder.write("file", "x");
  CHECK(bad_data([&] { CheckpointStore::load(file); }) ==
        "cannot open " + file + ": Not a directory");
  fs::create_directory(folder.path(step_name(1)));
  const auto manifest = folder.path(step_name(1)) + "/manifest.json";
  CHECK(bad_data([&] { CheckpointStore::load(folder.path()); }) ==
        "cannot open " + manifest + ": No such file or directory");
}

TEST_CASE("A changed, missing or added byte anywhere is found") {
  const Folder folder;
  const auto path = save(CheckpointStore(folder.path()), Sample(1).checkpoint);
  for (const auto& name : names_in(path)) {
    const auto file = path + "/" + name;
    const std::string whole = read_text(file);
    for (size_t at = 0; at < whole.size(); ++at) {
      for (const int flip : {1, 2, 4, 8, 16, 32, 64, 128, 255}) {
        std::string changed = whole;
        changed[at] = static_cast<char>(changed[at] ^ flip);
        write_text(file, changed);
        REQUIRE(bad_data([&] { CheckpointStore::load(path); }).starts_with(file + ": "));
      }
      write_text(file, whole.substr(0, at));
      REQUIRE(bad_data([&] { CheckpointStore::load(path); }).starts_with(file + ": "));
    }
    for (const std::string more : {"\n", " ", "x"}) {
      write_text(file, whole + more);
      REQUIRE(bad_data([&] { CheckpointStore::load(path); }).starts_with(file + ": "));
    }
    fs::remove(file);
    if (name != "manifest.json") {
      CHECK(bad_data([&] { CheckpointStore::load(path); }) ==
            "cannot open " + file + ": No such file or directory");
    }
    // Neither a folder nor a pipe is a regular file. Opening the pipe must not block.
    fs::create_directory(file);
    CHECK(bad_data([&] { CheckpointStore::load(path); }) == file + ": not a regular file");
    fs::remove(file);
    REQUIRE(mkfifo(file.c_str(), 0600) == 0);
    CHECK(bad_data([&] { CheckpointStore::load(path); }) == file + ": not a regular file");
    fs::remove(file);
    write_text(file, whole);
    check_same(CheckpointStore::load(path), Sample(1).checkpoint);
  }
}

TEST_CASE("Files that do not match the manifest are named with the reason") {
  const Folder folder;
  const auto path = save(CheckpointStore(folder.path()), Sample(1).checkpoint);
  const auto model = path + "/model.safetensors";
  const auto optimizer = path + "/optimizer.safetensors";
  const auto whole = read_text(model);
  write_text(model, whole + "x");
  CHECK(bad_data([&] { CheckpointStore::load(path); }) ==
        model + ": of " + std::to_string(whole.size() + 1) + " bytes, the manifest says " +
            std::to_string(whole.size()));
  std::string changed = whole;
  changed.back() ^= 1;
  write_text(model, changed);
  CHECK(bad_data([&] { CheckpointStore::load(path); }) ==
        model + ": damaged: its checksum differs from the one in manifest.json");
  // The file has the size and the hash of the manifest, but it is not a safetensors file.
  write_text(model, whole);
  std::string manifest = read_text(path + "/manifest.json");
  manifest.resize(manifest.rfind(",\"xxh64\""));
  char digits[17];
  std::snprintf(digits, sizeof digits, "%016llx",
                static_cast<unsigned long long>(content_hash("no tensors here!")));
  const auto at = manifest.find("optimizer");
  manifest.replace(manifest.find("xxh64\":\"", at) + 8, 16, digits);
  CHECK(read_text(optimizer).size() == 16);
  write_text(optimizer, "no tensors here!");
  write_text(path + "/manifest.json", sealed(manifest));
  CHECK(bad_data([&] {
          CheckpointStore::load(path);
        }).starts_with(optimizer + ": not a safetensors file: "));
}

TEST_CASE("A valid checksum with invalid contents of a manifest is refused") {
  const Folder folder;
  const auto manifest = folder.path("manifest.json");
  const auto refused = [&](const std::string& text) {
    write_text(manifest, sealed(text));
    const auto message = bad_data([&] { CheckpointStore::load(folder.path()); });
    REQUIRE(message.starts_with(manifest + ": "));
    return message.substr(manifest.size() + 2);
  };
  // Each case changes one field of a valid manifest.
  const std::map<std::string, std::string> right = {{"format", "\"distrain-checkpoint\""},
                                                    {"version", "1"},
                                                    {"step", "5"},
                                                    {"files", "{}"},
                                                    {"state", "{}"}};
  const auto text_of = [](const std::map<std::string, std::string>& fields) {
    std::string text;
    for (const auto& [key, value] : fields) {
      text += (text.empty() ? "{\"" : ",\"") + key + "\":" + value;
    }
    return text;
  };
  const auto with = [&](const std::string& key, const std::string& value) {
    auto fields = right;
    fields[key] = value;
    return refused(text_of(fields));
  };
  write_text(manifest, sealed(text_of(right)));
  CHECK(CheckpointStore::load(folder.path()).step == 5);

  for (const auto& [key, _] : right) {
    auto fields = right;
    fields.erase(key);
    CHECK(refused(text_of(fields)) == "the manifest has no '" + key + "'");
  }
  CHECK(with("more", "1") == "the manifest has a key that is not in the format");
  CHECK(with("format", "\"x\"") == "not the manifest of a checkpoint");
  CHECK(with("version", "2") == "of version 2, this program reads 1");
  for (const std::string value :
       {"-1", "1.0", "1e0", "\"1\"", "null", "[]", "9223372036854775808"}) {
    CHECK(with("version", value) == "'version' is not a number from 0 on");
    CHECK(with("step", value) == "'step' is not a number from 0 on");
    CHECK(with("generation", value) == "'generation' is not a number from 0 on");
  }
  CHECK(with("step", "1000000000000") == "'step' is too large");
  CHECK(with("generation", "1000000000000") == "'generation' is too large");
  CHECK(with("files", "[]") == "'files' is not an object");
  CHECK(with("state", "[]") == "'state' is not an object");
  CHECK(with("state", "{\"a\":1,\"a\":2}") == "'a' is there twice");
  CHECK(with("state", "{},\"state\":{}") == "'state' is there twice");
  CHECK(with("state", std::string(100'000, '[')) == "nested too deep");
  CHECK(with("state", "{\"a\":1e999}") == "not JSON");
  CHECK(with("state", "{") == "not JSON");
  CHECK(refused("") == "not JSON");
  CHECK(refused("[1") == "not JSON");
  CHECK(refused("\xEF\xBB\xBF" + text_of(right)) == "not JSON");
  CHECK(refused(text_of(right) + std::string("}\0", 2)) == "not JSON");
  std::string keys = "{\"k\":0";
  for (int i = 0; i < 4096; ++i) keys += ",\"" + std::to_string(i) + "\":0";
  CHECK(with("state", keys + "}") == "an object with too many keys");

  const auto file = [&](const std::string& name, const std::string& value) {
    return with("files", "{\"" + name + "\":" + value + "}");
  };
  const std::string listed = R"({"bytes":1,"xxh64":"0123456789abcdef"})";
  for (const std::string name :
       {"", ".", "..", ".x", "/etc/passwd", "../x", "a/b", "manifest.json", "a\\u0000b", "a\\nb"}) {
    CHECK(file(name, listed).ends_with("has a name that files of a checkpoint cannot have"));
  }
  CHECK(file(std::string(256, 'x'), listed).ends_with("that files of a checkpoint cannot have"));
  CHECK(file("a", "1") == "file 'a' is not an object");
  CHECK(file("a", R"({"bytes":1})") == "file 'a' has no 'xxh64'");
  CHECK(file("a", R"({"xxh64":"0123456789abcdef"})") == "file 'a' has no 'bytes'");
  CHECK(file("a", R"({"bytes":1,"xxh64":"0123456789abcdef","x":1})") ==
        "file 'a' has a key that is not in the format");
  CHECK(file("a", R"({"bytes":-1,"xxh64":"0123456789abcdef"})") ==
        "'bytes' is not a number from 0 on");
  for (const std::string hash :
       {"1", "\"0123456789abcde\"", "\"0123456789abcdeF\"", "\"x123456789abcdef\""}) {
    CHECK(file("a", "{\"bytes\":1,\"xxh64\":" + hash + "}") == "file 'a' has no hash");
  }
  // load() compares the manifest's size with the file's before it allocates memory.
  folder.write("a", "x");
  CHECK(bad_data([&] {
          write_text(
              manifest,
              sealed(text_of(
                  {{"format", right.at("format")},
                   {"version", "1"},
                   {"step", "5"},
                   {"files", R"({"a":{"bytes":9223372036854775807,"xxh64":"0123456789abcdef"}})"},
                   {"state", "{}"}})));
          CheckpointStore::load(folder.path());
        }) == folder.path("a") + ": of 1 bytes, the manifest says 9223372036854775807");
  write_text(manifest, std::string((64 << 20) + 1, ' '));
  CHECK(bad_data([&] { CheckpointStore::load(folder.path()); }) ==
        manifest + ": longer than 67108864 bytes");
}

}  // namespace distrain::store
