// Tests who may write to a checkpoint folder: symbolic links by other users, two concurrent jobs,
// and a job that continues after another job has taken over its folder.
// ctest: labels=notsan
#include <csignal>
#include <filesystem>
#include <optional>
#include <string>

#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "checkpoint_sample.h"
#include "child_process.h"
#include "distrain/store/checkpoint_store.h"
#include "support/catch.h"

namespace distrain::store {
namespace {

constexpr const char* kLinkRefused = ": a symbolic link, which is not followed";

/// A checkpoint outside of the tested folder. A save or load must not reach it through a link.
class Outside {
 public:
  Outside() {
    save(CheckpointStore(folder_.path()), Sample(1).checkpoint);
    folder_.write(step_name(1) + "/precious", "data");
  }
  std::string path() const { return folder_.path(step_name(1)); }
  void check_untouched() const {
    CHECK(names_in(folder_.path()) == Strings{step_name(1)});
    CHECK(names_in(path()) ==
          Strings{"manifest.json", "model.safetensors", "optimizer.safetensors", "precious"});
    CHECK(read_text(path() + "/precious") == "data");
    check_newest(folder_.path(), Sample(1));
  }

 private:
  Folder folder_;
};

/// Puts a checkpoint of `generation` into `folder`, as a job on another machine would.
void put_from_elsewhere(const std::string& folder, int64_t step, int generation) {
  const Folder elsewhere;
  for (int job = 0; job < generation; ++job) {
    save(CheckpointStore(elsewhere.path()), Sample(step).checkpoint);
  }
  fs::copy(elsewhere.path(step_name(step)), folder + "/" + step_name(step),
           fs::copy_options::recursive);
}

int64_t generation_in(const std::string& checkpoint) {
  return Json::parse(read_text(checkpoint + "/manifest.json")).value("generation", int64_t{0});
}

std::string refused(CheckpointStore& store, int64_t step) {
  return bad_data([&] { save(store, Sample(step).checkpoint); });
}

}  // namespace

TEST_CASE("The folder that the user names may be a link") {
  const Folder folder;
  fs::create_directory(folder.path("large disk"));
  fs::create_directory_symlink("large disk", folder.path("saves"));
  CheckpointStore store(folder.path("saves"));
  store.prepare();
  for (int64_t step = 1; step < 4; ++step) save(store, Sample(step).checkpoint);
  check_newest(folder.path("saves"), Sample(3));
  CHECK(names_in(folder.path("large disk")) == Strings{step_name(2), step_name(3)});
  // A path that the user passes to load() may also be a symbolic link.
  fs::create_directory_symlink("saves/" + step_name(2), folder.path("best"));
  check_same(CheckpointStore::load(folder.path("best")), Sample(2).checkpoint);
}

TEST_CASE("A link in place of a checkpoint is refused by all readers and writers") {
  const Outside outside;
  const Folder folder;
  save(CheckpointStore(folder.path()), Sample(2).checkpoint);
  const auto link = folder.path(GENERATE("", ".replaced-") + step_name(3));
  fs::create_directory_symlink(outside.path(), link);
  const std::string expected = link + kLinkRefused;
  CHECK(bad_data([&] { CheckpointStore::load(folder.path()); }) == expected);
  CHECK(bad_data([&] { CheckpointStore::load(folder.path(), Depth::kManifest); }) == expected);
  CHECK(CheckpointStore::intact_before(folder.path()) == folder.path(step_name(2)));
  CHECK(bad_data([&] { CheckpointStore(folder.path()).prepare(); }) == expected);
  CHECK(bad_data([&] { save(CheckpointStore(folder.path()), Sample(4).checkpoint); }) == expected);
  if (link.ends_with("/" + step_name(3))) {
    for (const auto& path : {link, link + "/"}) {
      CHECK(bad_data([&] { CheckpointStore::load(path); }).ends_with(kLinkRefused));
    }
  }
  CHECK(fs::is_symlink(link));
  CHECK(names_in(folder.path()).size() == 2);
  outside.check_untouched();
}

TEST_CASE("A link in place of a checkpoint's file is refused") {
  const Outside outside;
  const Folder folder;
  const auto path = save(CheckpointStore(folder.path()), Sample(1).checkpoint);
  for (const std::string name : {"manifest.json", "model.safetensors"}) {
    const auto file = path + "/" + name;
    fs::rename(file, file + ".moved");
    fs::create_symlink(outside.path() + "/" + name, file);
    for (const auto& from : {path, folder.path()}) {
      CHECK(bad_data([&] { CheckpointStore::load(from); }) == file + kLinkRefused);
    }
    fs::rename(file + ".moved", file);
  }
  check_newest(folder.path(), Sample(1));
}

TEST_CASE("A link in place of a save's leftovers is removed, but not its target") {
  const Outside outside;
  const Folder folder;
  for (const std::string prefix : {".tmp-", ".old-"}) {
    fs::create_directory_symlink(outside.path(), folder.path(prefix + step_name(1)));
    fs::create_directory(folder.path(prefix + step_name(2)));
    fs::create_symlink(outside.path() + "/precious",
                       folder.path(prefix + step_name(2)) + "/model.safetensors");
  }
  fs::create_directory_symlink(outside.path(), folder.path(".tmp-" + step_name(0)));
  CheckpointStore store(folder.path());
  store.prepare();
  save(store, Sample(1).checkpoint);
  CHECK(names_in(folder.path()) == Strings{step_name(1)});
  outside.check_untouched();
}

TEST_CASE("A link that replaces the open folder is not followed") {
  const Outside outside;
  const Folder folder;
  const auto saves = folder.path("saves");
  const auto swap = [&] {
    fs::rename(saves, folder.path("moved"));
    fs::create_directory_symlink(outside.path(), saves);
  };
  SECTION("between two saves") {
    CheckpointStore store(saves);
    store.prepare();
    save(store, Sample(1).checkpoint);
    swap();
    CHECK(error_of(base::ErrorKind::kResources, [&] { save(store, Sample(2).checkpoint); }) ==
          saves + ": another folder stands where this job has saved");
  }
  SECTION("during a save") {
    CheckpointStore(saves).prepare();
    save(CheckpointStore(saves), Sample(1).checkpoint);
    CheckpointStore store(saves, [&](const char* name) {
      if (name == std::string("pwrite") && !fs::is_symlink(saves)) swap();
    });
    CHECK(error_of(base::ErrorKind::kResources, [&] { save(store, Sample(2).checkpoint); }) ==
          saves + ": another folder stands where this job has saved");
  }
  CHECK(names_in(folder.path("moved")) == Strings{step_name(1)});
  check_newest(folder.path("moved"), Sample(1));
  outside.check_untouched();
}

TEST_CASE("A link that replaces the checkpoint being written is not published as a checkpoint") {
  const Outside outside;
  const Folder folder;
  save(CheckpointStore(folder.path()), Sample(1).checkpoint);
  const auto unfinished = folder.path(".tmp-" + step_name(2));
  const std::string at = GENERATE("openat", "fsync");
  CheckpointStore store(
      folder.path(),
      [&](const char* name) {
        if (name != at || !fs::exists(unfinished) || fs::is_symlink(unfinished)) return;
        fs::rename(unfinished, folder.path("moved"));
        fs::create_directory_symlink(outside.path(), unfinished);
      },
      1);
  CHECK(refused(store, 2) == folder.path(step_name(2)) + ": not the folder that was written");
  CHECK(names_in(folder.path("moved")) ==
        Strings{"manifest.json", "model.safetensors", "optimizer.safetensors"});
  CHECK(CheckpointStore::intact_before(folder.path()) == folder.path(step_name(1)));
  outside.check_untouched();
}

TEST_CASE("A second job on one folder is refused until the first has ended") {
  const Folder folder;
  const auto link = folder.path() + ".link";
  fs::create_directory_symlink(folder.path(), link);
  std::optional<CheckpointStore> first(folder.path());
  SECTION("prepared") { first->prepare(); }
  SECTION("at its first save") { save(*first, Sample(1).checkpoint); }
  const auto before = names_in(folder.path());
  for (const auto& path : {folder.path(), folder.path() + "/", link}) {
    CheckpointStore second(path);
    const std::string named = path == link ? link : folder.path();
    const std::string expected = "another job saves in this folder: " + named;
    const std::string process = " (process " + std::to_string(getpid()) + ")";
    const auto check_refused = [&](const std::string& message) {
      // The message names the process if the kernel reports its ID.
      CHECK((message == expected || message == expected + process));
    };
    check_refused(bad_data([&] { second.prepare(); }));
    check_refused(refused(second, 2));
  }
  CHECK(names_in(folder.path()) == before);
  save(*first, Sample(2).checkpoint);
  first.reset();
  CheckpointStore second(link);
  second.prepare();
  save(second, Sample(3).checkpoint);
  check_newest(folder.path(), Sample(3));
  fs::remove(link);
}

TEST_CASE("The folder of a killed job is free") {
  const Folder folder;
  int pipe_of_child[2];
  REQUIRE(pipe(pipe_of_child) == 0);
  const pid_t child = fork();
  if (child == 0) {
    CheckpointStore store(folder.path());
    store.prepare();
    if (write(pipe_of_child[1], "x", 1) != 1) _exit(1);
    pause();
    _exit(1);
  }
  char byte = 0;
  REQUIRE(read(pipe_of_child[0], &byte, 1) == 1);
  CHECK(bad_data([&] {
          CheckpointStore(folder.path()).prepare();
        }).starts_with("another job saves in this folder: "));
  kill(child, SIGKILL);
  REQUIRE(waitpid(child, nullptr, 0) == child);
  close(pipe_of_child[0]);
  close(pipe_of_child[1]);
  CheckpointStore(folder.path()).prepare();
}

TEST_CASE("After the lock file is removed, another job may take the folder over") {
  const Folder folder;
  const auto lock = folder.path(".lock");
  const std::string expected = "another job saves in this folder: ";
  CheckpointStore first(folder.path());
  first.prepare();
  save(first, Sample(1).checkpoint);
  REQUIRE(fs::remove(lock));
  save(first, Sample(2).checkpoint);  // also takes the folder over again
  std::optional<CheckpointStore> second(folder.path());
  CHECK(bad_data([&] { second->prepare(); }).starts_with(expected));
  REQUIRE(fs::remove(lock));
  second->prepare();
  for (const int64_t step : {3, 4}) CHECK(refused(first, step).starts_with(expected));
  CHECK(names_in(folder.path()) == Strings{step_name(1), step_name(2)});
  // If the second job ends without a save, the first job can save again.
  second.reset();
  save(first, Sample(3).checkpoint);
  CHECK(names_in(folder.path()) == Strings{step_name(2), step_name(3)});
}

TEST_CASE("A link in place of the lock file is not followed") {
  const Folder outside;
  const Folder folder;
  fs::create_symlink(outside.path("file"), folder.path(".lock"));
  const std::string expected = folder.path(".lock") + kLinkRefused;
  CHECK(bad_data([&] { CheckpointStore(folder.path()).prepare(); }) == expected);
  CheckpointStore store(folder.path());
  CHECK(refused(store, 1) == expected);
  CHECK(fs::is_empty(outside.path()));
}

TEST_CASE("If a file system has no locks, a job warns and relies on the generations") {
  const Folder folder;
  const int code = in_child([&] {
    forbid(SYS_flock, ENOLCK);
    CheckpointStore first(folder.path());
    CheckpointStore second(folder.path());
    if (first.why_no_lock()) return 1;
    first.prepare();
    second.prepare();
    if (first.why_no_lock() != "No locks available") return 2;
    // Both have the same generation because neither has found a checkpoint of the other.
    save(second, Sample(1).checkpoint);
    save(second, Sample(2).checkpoint);
    try {
      save(first, Sample(9).checkpoint);
      return 3;
    } catch (const base::Exception& exception) {
      const std::string expected =
          "another job has taken over " + folder.path() + ": it has saved there, as generation 1";
      if (exception.error().message != expected) return 4;
    }
    save(second, Sample(3).checkpoint);
    return 0;
  });
  if (code == kNoSeccomp) {
    WARN("no seccomp here");
    return;
  }
  CHECK(code == 0);
  CHECK(names_in(folder.path()) == Strings{step_name(2), step_name(3)});
}

TEST_CASE("A reader needs no lock and leaves no files") {
  const Folder folder;
  for (const int64_t step : {1, 2}) save(CheckpointStore(folder.path()), Sample(step).checkpoint);
  fs::remove(folder.path(".lock"));
  const auto changed = fs::last_write_time(folder.path());
  const int code = in_child([&] {
    for (const long number : {SYS_flock, SYS_mkdirat, SYS_unlinkat, SYS_renameat, SYS_write}) {
      forbid(number, EROFS);
    }
    if (CheckpointStore::load(folder.path()).step != 2) return 1;
    if (CheckpointStore::load(folder.path(), Depth::kManifest).step != 2) return 2;
    if (CheckpointStore::newest(folder.path()) != folder.path(step_name(2))) return 3;
    return CheckpointStore::intact_before(folder.path()) == folder.path(step_name(1)) ? 0 : 4;
  });
  if (code != kNoSeccomp) CHECK(code == 0);
  CHECK(fs::last_write_time(folder.path()) == changed);
}

TEST_CASE("Each job that takes over a folder increments the generation") {
  const Folder folder;
  for (int generation = 1; generation < 4; ++generation) {
    CheckpointStore store(folder.path());
    store.prepare();
    for (const int64_t step : {2 * generation, 2 * generation + 1}) {
      CHECK(generation_in(save(store, Sample(step).checkpoint)) == generation);
    }
  }
  // A checkpoint without a generation, from an older version, is loaded and counts as generation 0.
  const auto manifest = folder.path(step_name(7)) + "/manifest.json";
  std::string text = read_text(manifest);
  text.resize(text.rfind(",\"xxh64\""));
  const std::string key = "\"generation\":3,";
  REQUIRE(text.find(key) != std::string::npos);
  text.erase(text.find(key), key.size());
  write_text(manifest, sealed(text));
  fs::remove_all(folder.path(step_name(6)));
  check_newest(folder.path(), Sample(7));
  CHECK(generation_in(save(CheckpointStore(folder.path()), Sample(8).checkpoint)) == 1);
  // The generation of a damaged checkpoint is ignored, and the job can still save.
  write_text(folder.path(step_name(8)) + "/manifest.json", "{\"generation\":9}");
  CHECK(generation_in(save(CheckpointStore(folder.path()), Sample(9).checkpoint)) == 1);
}

TEST_CASE("A job whose folder another job took over neither writes nor deletes") {
  const Folder folder;
  put_from_elsewhere(folder.path(), 1, 1);
  std::string at;
  int64_t step_of_other = 2;
  CheckpointStore zombie(
      folder.path(),
      [&](const char* name) {
        if (name != at) return;
        at.clear();
        put_from_elsewhere(folder.path(), step_of_other, 4);
      },
      1);
  zombie.prepare();
  const std::string expected =
      "another job has taken over " + folder.path() + ": it has saved there, as generation 4";
  SECTION("before a save") {
    step_of_other = GENERATE(1, 2, 9);  // the other job's checkpoint may be the newest by step
    fs::remove_all(folder.path(step_name(1)));
    put_from_elsewhere(folder.path(), step_of_other, 4);
    fs::create_directory(folder.path(".tmp-" + step_name(5)));
    fs::create_directory(folder.path(".old-" + step_name(4)));
    const auto before = names_in(folder.path());
    CHECK(refused(zombie, 5) == expected);
    CHECK(refused(zombie, 6) == expected);
    CHECK(names_in(folder.path()) == before);
  }
  SECTION("during a write") {
    at = GENERATE("pwrite", "fsync");
    CHECK(refused(zombie, 5) == expected);
    CHECK(names_in(folder.path()) == Strings{step_name(1), step_name(2)});
  }
  SECTION("before it removes the older checkpoints") {
    // The superseded job published its checkpoint before the takeover, so that checkpoint stays.
    int renames = 0;
    CheckpointStore other_zombie(
        folder.path("other"),
        [&](const char* name) {
          if (name == std::string("renameat") && ++renames == 3) {
            put_from_elsewhere(folder.path("other"), 2, 4);
          }
        },
        1);
    fs::create_directory(folder.path("other"));
    put_from_elsewhere(folder.path("other"), 1, 1);
    CHECK(refused(other_zombie, 5).ends_with(": it has saved there, as generation 4"));
    CHECK(names_in(folder.path("other")) == Strings{step_name(1), step_name(2), step_name(5)});
  }
  if (fs::exists(folder.path(step_name(2)))) {
    check_same(CheckpointStore::load(folder.path(step_name(2))), Sample(2).checkpoint);
  }
}

// If rank 0's machine is suspended, the job may be resumed on another machine, which does not see
// the lock. Later the first machine may continue its save.
TEST_CASE("A save that is suspended while another job takes over the folder does no harm") {
  constexpr int kSaved = 0;
  constexpr int kRefused = 1;
  int refusals = 0;
  int late = 0;
  const Folder begin;
  for (const int64_t step : {1, 2}) save(CheckpointStore(begin.path()), Sample(step).checkpoint);
  for (int nth = 1;; ++nth) {
    const Folder folder;
    fs::copy(begin.path(), folder.path(), fs::copy_options::recursive);
    const pid_t zombie = fork();
    if (zombie == 0) {
      forbid(SYS_flock, ENOLCK);
      int calls = -1;
      CheckpointStore store(
          folder.path(),
          [&](const char*) {
            if (calls >= 0 && ++calls == nth) raise(SIGSTOP);
          },
          1);
      store.prepare();
      calls = 0;
      try {
        save(store, Sample(5).checkpoint);
      } catch (const base::Exception& exception) {
        _exit(exception.kind() == base::ErrorKind::kBadData ? kRefused : 3);
      }
      _exit(kSaved);
    }
    int status = 0;
    REQUIRE(waitpid(zombie, &status, WUNTRACED) == zombie);
    if (WIFEXITED(status) && WEXITSTATUS(status) == kNoSeccomp) {
      WARN("no seccomp here");
      return;
    }
    if (!WIFSTOPPED(status)) {  // the child ended before its nth call
      REQUIRE(WEXITSTATUS(status) == kSaved);
      break;
    }
    save(CheckpointStore(folder.path()), Sample(4).checkpoint);
    const auto before = names_in(folder.path());
    REQUIRE(kill(zombie, SIGCONT) == 0);
    REQUIRE(waitpid(zombie, &status, 0) == zombie);
    REQUIRE(WIFEXITED(status));
    check_same(CheckpointStore::load(folder.path(step_name(4))), Sample(4).checkpoint);
    refusals += WEXITSTATUS(status) == kRefused ? 1 : 0;
    late += names_in(folder.path()) == before ? 0 : 1;
  }
  CHECK(refusals > 15);
  // A suspended save may still finish the system call in which it was suspended. Only four of its
  // calls publish or remove files, so at most four saves changed the folder after the stop.
  CHECK(late <= 4);
}

TEST_CASE("A folder that is removed during a job is an error, and is not created again") {
  const Folder folder;
  const auto saves = folder.path("saves");
  CheckpointStore store(saves);
  store.prepare();
  save(store, Sample(1).checkpoint);
  fs::remove_all(saves);
  const auto message = [&] {
    return error_of(base::ErrorKind::kResources, [&] { save(store, Sample(2).checkpoint); });
  };
  CHECK(message() == "cannot save in " + saves + ": No such file or directory");
  CHECK_FALSE(fs::exists(saves));
  fs::create_directory(saves);
  CHECK(message() == saves + ": another folder stands where this job has saved");
  CHECK(fs::is_empty(saves));
}

}  // namespace distrain::store
