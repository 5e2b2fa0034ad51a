#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "distrain/base/process.h"
#include "support/catch.h"

using distrain::base::TemporaryPath;
namespace fs = std::filesystem;

namespace {

TemporaryPath new_folder() {
  std::string pattern = (fs::temp_directory_path() / "temporary-path-XXXXXX").string();
  REQUIRE(mkdtemp(pattern.data()) != nullptr);
  return TemporaryPath(pattern);
}

}  // namespace

TEST_CASE("a temporary folder is removed with its object") {
  std::string path;
  {
    const TemporaryPath folder = new_folder();
    path = folder.path();
    REQUIRE(fs::is_directory(path));
    std::ofstream(path + "/file") << "text";
  }
  CHECK_FALSE(fs::exists(path));
}

TEST_CASE("a finished file is kept") {
  const TemporaryPath folder = new_folder();
  const std::string kept = folder.path() + "/kept";
  const std::string dropped = folder.path() + "/dropped";
  {
    TemporaryPath one(kept);
    const TemporaryPath other(dropped);
    std::ofstream(kept) << "text";
    std::ofstream(dropped) << "text";
    one.keep();
  }
  CHECK(fs::exists(kept));
  CHECK_FALSE(fs::exists(dropped));
}

TEST_CASE("all temporary paths of a process are removed at once") {
  const TemporaryPath one = new_folder();
  const TemporaryPath two = new_folder();
  {
    const auto none_anew = TemporaryPath::remove_all();
    CHECK_FALSE(fs::exists(one.path()));
    CHECK_FALSE(fs::exists(two.path()));
  }
  CHECK(fs::exists(new_folder().path()));
}
