// Tests the removal of folders in which other users have created symbolic links.
#include <filesystem>

#include "distrain/store/disk.h"
#include "support/files.h"

using namespace distrain;
using store::Disk;
using store::OpenFolder;
using testing::Folder;
namespace fs = std::filesystem;

namespace {

void remove_in(const Folder& folder, const std::string& name, const Disk::Probe& probe = {}) {
  const Disk disk(probe);
  OpenFolder::at(disk, folder.path())->remove_folder(name);
}

}  // namespace

TEST_CASE("removing a folder removes its files, and nothing outside of it") {
  const Folder outside;
  outside.write("precious", "data");
  const Folder folder;
  const std::string doomed = folder.path("doomed");
  fs::create_directory(doomed);
  testing::write_text(doomed + "/file", "text");
  SECTION("without a link") {}
  SECTION("with a link to a folder") { fs::create_symlink(outside.path(), doomed + "/link"); }
  SECTION("with a link to a file") {
    fs::create_symlink(outside.path("precious"), doomed + "/link");
  }
  SECTION("with a link in place of the folder") {
    fs::remove_all(doomed);
    fs::create_symlink(outside.path(), doomed);
  }
  SECTION("with a link that replaces the open folder") {
    // Before the first unlinkat(), when the folder is already open, replaces the folder by a link.
    const Disk::Probe swap = [&](const char* name) {
      if (std::string(name) != "unlinkat" || fs::is_symlink(doomed)) return;
      fs::rename(doomed, folder.path("moved"));
      fs::create_symlink(outside.path(), doomed);
    };
    fs::create_hard_link(doomed + "/file", doomed + "/precious");
    remove_in(folder, "doomed", swap);
    CHECK(fs::is_empty(folder.path("moved")));
  }
  remove_in(folder, "doomed");
  CHECK_FALSE(fs::exists(fs::symlink_status(doomed)));
  CHECK(testing::read_text(outside.path("precious")) == "data");
}

TEST_CASE("a path that is not a folder is not removed as one") {
  const Folder folder;
  folder.write("file", "text");
  remove_in(folder, "file");
  remove_in(folder, "none");
  CHECK(testing::read_text(folder.path("file")) == "text");
}
