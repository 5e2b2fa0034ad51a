// Tests checkpoints that are written in ranges, and by several processes.
#include <algorithm>
#include <thread>

#include "checkpoint_sample.h"
#include "child_process.h"
#include "distrain/store/checkpoint_store.h"

namespace distrain::store {
namespace {

std::span<const uint8_t> range_of(const at::Tensor& tensor) {
  return {static_cast<const uint8_t*>(tensor.const_data_ptr()), tensor.nbytes()};
}

// Writes `text` into `folder` as another process would, and returns its sum.
FileSum write_apart(const std::string& folder, const std::string& name, const std::string& text) {
  const Disk disk;
  const auto opened = OpenFolder::at(disk, folder);
  REQUIRE(opened);
  OutputFile file = opened->create(name);
  file.write({reinterpret_cast<const uint8_t*>(text.data()), text.size()});
  return file.finish_with_sum();
}

}  // namespace

TEST_CASE("the pieces of a file may be written in any order and by several threads") {
  const Folder folder;
  CheckpointStore store(folder.path());
  const at::Tensor a = at::randn({1000, 3}), b = at::arange(5), none = at::empty({0, 2});
  const auto saving = store.begin(3, {{"x", 1}});
  std::vector<TensorInfo> infos = infos_of({{"a", a}, {"b", b}, {"none", none}});
  OutputFile file = saving->create("model.safetensors", infos);
  file.write_at(infos[1].offset, range_of(b));
  const auto write = [&](uint64_t parity) {
    for (uint64_t first = 0; first < infos[0].bytes; first += 100) {
      if (first / 100 % 2 == parity) continue;
      file.write_at(infos[0].offset + first,
                    range_of(a).subspan(first, std::min<uint64_t>(100, infos[0].bytes - first)));
    }
  };
  std::thread other([&] { write(0); });
  write(1);
  other.join();
  saving->add("model.safetensors", file);
  CHECK_FALSE(CheckpointStore::newest(folder.path()));
  const std::string path = saving->commit();
  Checkpoint expected;
  expected.step = 3;
  expected.state = {{"x", 1}};
  expected.files["model.safetensors"] = {{"a", a}, {"b", b}, {"none", none}};
  const LoadedCheckpoint loaded = CheckpointStore::load(path);
  check_same(loaded, expected);
  fs::remove_all(path);
  check_same(loaded, expected);  // its files are open
}

TEST_CASE("a checkpoint that is not committed leaves nothing behind") {
  const Folder folder;
  CheckpointStore store(folder.path());
  save(store, Sample(1).checkpoint);
  {
    const auto saving = store.begin(2, nlohmann::ordered_json::object());
    saving->create("a");
    CHECK(fs::exists(saving->path() + "/a"));
    CHECK(saving->path() == folder.path(".tmp-" + step_name(2)));
  }
  CHECK(names_in(folder.path()) == Strings{step_name(1)});
  save(store, Sample(2).checkpoint);
  check_newest(folder.path(), Sample(2));
}

TEST_CASE("a file of another process is adopted if it is a regular file of the right size") {
  const Folder folder;
  CheckpointStore store(folder.path());
  const std::string text = "{\"a\":1}";
  {
    const auto saving = store.begin(1, nlohmann::ordered_json::object());
    const std::string path = saving->path() + "/";
    FileSum sum = write_apart(saving->path(), "x.json", text);
    CHECK(sum.bytes == text.size());
    CHECK(sum.hash == content_hash(text));
    saving->adopt("x.json", sum);
    ++sum.bytes;
    CHECK(bad_data([&] { saving->adopt("x.json", sum); }) ==
          path + "x.json: of 7 bytes, its writer says 8");
    CHECK(bad_data([&] { saving->adopt("y", sum); }) ==
          "cannot open " + path + "y: No such file or directory");
    fs::create_symlink("x.json", path + "link");
    CHECK(bad_data([&] { saving->adopt("link", sum); }).ends_with("which is not followed"));
    fs::create_directory(path + "folder");
    CHECK(bad_data([&] { saving->adopt("folder", sum); }) == path + "folder: not a regular file");
    fs::remove(path + "folder");
    fs::remove(path + "link");
    saving->commit();
  }
  CHECK(CheckpointStore::load(folder.path()).files.empty());  // JSON is only verified
  write_text(folder.path(step_name(1)) + "/x.json", "{\"a\":2}");
  CHECK(bad_data([&] { CheckpointStore::load(folder.path()); }).find("damaged") !=
        std::string::npos);
}

TEST_CASE("another process writes a file that rank 0 has created") {
  const Folder folder;
  CheckpointStore store(folder.path());
  const auto saving = store.begin(1, nlohmann::ordered_json::object());
  saving->create("x.json").write_at(0, std::vector<uint8_t>{'n', 'o', 'n'});
  const Disk disk;
  const auto opened = OpenFolder::at(disk, saving->path());
  OutputFile file = opened->reopen("x.json");
  const std::string text = "{\"a\":1}";
  file.write({reinterpret_cast<const uint8_t*>(text.data()), text.size()});
  saving->adopt("x.json", file.finish_with_sum());
  CHECK(error_of(base::ErrorKind::kResources, [&] { opened->reopen("y"); }) ==
        "cannot open " + saving->path() + "/y: No such file or directory");
  fs::create_symlink("x.json", saving->path() + "/link");
  CHECK(error_of(base::ErrorKind::kResources, [&] {
          opened->reopen("link");
        }).starts_with("cannot open "));
  fs::remove(saving->path() + "/link");
  saving->state()["b"] = 2;
  const LoadedCheckpoint loaded = CheckpointStore::load(saving->commit());
  CHECK(loaded.state["b"] == 2);
  CHECK(loaded.hash != 0);
  CHECK(loaded.hash == CheckpointStore::load(folder.path(), Depth::kManifest).hash);
}

TEST_CASE("a part is opened before it is adopted only if it is a safetensors file") {
  const Folder folder;
  CheckpointStore store(folder.path());
  const auto saving = store.begin(1, nlohmann::ordered_json::object());
  std::vector<TensorInfo> tensors = {{"a", at::kByte, {5}}};
  OutputFile file = saving->create("x", tensors);
  CHECK(bad_data([&] { saving->open("x"); }).ends_with("tensor 'a' goes beyond the file's end"));
  file.write_at(tensors[0].offset, std::vector<uint8_t>(5));
  CHECK(saving->open("x").tensors().contains("a"));
}

}  // namespace distrain::store
