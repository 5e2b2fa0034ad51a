#include <filesystem>
#include <fstream>

#include "distrain/base/temporary_path.h"
#include "support/catch.h"

using distrain::base::TemporaryPath;
namespace fs = std::filesystem;

TEST_CASE("a temporary folder goes with its object") {
  std::string path;
  {
    const TemporaryPath folder = TemporaryPath::folder();
    path = folder.path();
    REQUIRE(fs::is_directory(path));
    CHECK((fs::status(path).permissions() & fs::perms::all) == fs::perms::owner_all);
    std::ofstream(path + "/file") << "text";
  }
  CHECK_FALSE(fs::exists(path));
}

TEST_CASE("a temporary path goes once, wherever it was moved to") {
  TemporaryPath first = TemporaryPath::folder();
  const std::string path = first.path();
  TemporaryPath folder = std::move(first);
  CHECK(folder.path() == path);
  folder.remove();
  CHECK_FALSE(fs::exists(path));
  CHECK(folder.path().empty());
  std::ofstream(path) << "somebody else's";
  folder.remove();
  CHECK(fs::remove(path));
}

TEST_CASE("a file that is finished stays") {
  const TemporaryPath folder = TemporaryPath::folder();
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
  const TemporaryPath one = TemporaryPath::folder();
  const TemporaryPath two = TemporaryPath::folder();
  {
    const auto none_anew = TemporaryPath::remove_all();
    CHECK_FALSE(fs::exists(one.path()));
    CHECK_FALSE(fs::exists(two.path()));
  }
  CHECK(fs::exists(TemporaryPath::folder().path()));
}
