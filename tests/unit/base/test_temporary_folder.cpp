#include <filesystem>
#include <fstream>

#include "distrain/base/temporary_folder.h"
#include "support/catch.h"

using distrain::base::TemporaryFolder;
namespace fs = std::filesystem;

TEST_CASE("a temporary folder goes with its object") {
  std::string path;
  {
    const TemporaryFolder folder;
    path = folder.path();
    REQUIRE(fs::is_directory(path));
    CHECK((fs::status(path).permissions() & fs::perms::all) == fs::perms::owner_all);
    std::ofstream(path + "/file") << "text";
  }
  CHECK_FALSE(fs::exists(path));
}

TEST_CASE("a temporary folder is removed once") {
  TemporaryFolder folder;
  const std::string path = folder.path();
  folder.remove();
  CHECK_FALSE(fs::exists(path));
  CHECK(folder.path().empty());
  folder.remove();
}

TEST_CASE("all temporary folders of a process are removed at once") {
  const TemporaryFolder one;
  const TemporaryFolder two;
  TemporaryFolder::remove_all();
  CHECK_FALSE(fs::exists(one.path()));
  CHECK_FALSE(fs::exists(two.path()));
}
