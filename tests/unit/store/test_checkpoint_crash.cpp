// ctest: labels=ci,notsan timeout=120
#include <csignal>
#include <functional>
#include <string>

#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "checkpoint_sample.h"
#include "child_process.h"
#include "distrain/store/checkpoint_store.h"
#include "support/catch.h"

namespace distrain::store {
namespace {

constexpr int kSaved = 0;
constexpr int kKilled = 9;

// Saves in a child process that exits just before it makes its `nth` system call.
int save_and_die(const std::string& folder, const Checkpoint& checkpoint, int nth) {
  return in_child([&] {
    int calls = 0;
    CheckpointStore store(folder, [&](const char*) {
      if (++calls == nth) _exit(kKilled);
    });
    save(store, checkpoint);
    return kSaved;
  });
}

}  // namespace

TEST_CASE("A save that ends at any system call leaves the old or the new checkpoint") {
  const bool again = GENERATE(false, true);
  const bool only_one = GENERATE(false, true);
  const Sample before(1);
  const Sample old(2);
  const Sample wanted = again ? Sample(2, 1) : Sample(3);
  const Sample later(4);
  int ended_old = 0;
  int ended_new = 0;
  for (int nth = 1;; ++nth) {
    const Folder folder;
    if (!only_one) save(CheckpointStore(folder.path()), before.checkpoint);
    save(CheckpointStore(folder.path()), old.checkpoint);
    const int exit_code = save_and_die(folder.path(), wanted.checkpoint, nth);
    const auto newest = CheckpointStore::newest(folder.path());
    REQUIRE(newest);
    const auto loaded = CheckpointStore::load(folder.path());
    const bool is_new =
        loaded.step == wanted.checkpoint.step && loaded.state == wanted.checkpoint.state;
    check_same(loaded, is_new ? wanted.checkpoint : old.checkpoint);
    (is_new ? ended_new : ended_old)++;
    if (exit_code == kSaved) {
      REQUIRE(is_new);
      break;
    }
    REQUIRE(exit_code == kKilled);
    // A later save succeeds and removes all leftovers, even after a second crash at the same call.
    REQUIRE(save_and_die(folder.path(), wanted.checkpoint, nth) <= kKilled);
    REQUIRE(CheckpointStore::load(folder.path()).step >= old.checkpoint.step);
    save(CheckpointStore(folder.path()), later.checkpoint);
    check_newest(folder.path(), later);
    const auto names = names_in(folder.path());
    REQUIRE(names.size() == 2);
    for (const auto& name : names) {
      REQUIRE(name.starts_with("step-"));
      CheckpointStore::load(folder.path(name));
    }
  }
  CHECK(ended_old > 10);
  CHECK(ended_new > 3);
}

TEST_CASE("Removing the leftovers of a crashed save may crash as well") {
  const Sample later(4);
  for (int first = 1; first < 100; first += 3) {
    for (int second = 1; second < 100; second += 5) {
      const Folder folder;
      save(CheckpointStore(folder.path()), Sample(2).checkpoint);
      if (save_and_die(folder.path(), Sample(2, 1).checkpoint, first) == kSaved) return;
      if (save_and_die(folder.path(), Sample(2, 2).checkpoint, second) == kSaved) break;
      const auto loaded = CheckpointStore::load(folder.path());
      check_same(loaded, Sample(2, loaded.state["version"]).checkpoint);
    }
  }
}

TEST_CASE("Files are synced to the disk before they are renamed") {
  const Folder folder;
  Strings calls;
  CheckpointStore store(folder.path(), [&](const char* name) { calls.emplace_back(name); });
  save(store, Sample(1).checkpoint);
  const Strings expected = {"openat",   "flock",    "getdents",  // checks the owner of the folder
                            "getdents", "getdents",              // the folder is ours; lists it
                            "mkdirat",                           //
                            "openat",   "pwrite",   "pwrite",   "pwrite",  // header, two tensors
                            "fsync",    "pread",    "close",               // and the file's hash
                            "openat",   "pwrite",                          // without tensors
                            "fsync",    "pread",    "close",               //
                            "openat",   "pwrite",   "fsync",    "close",   // the manifest
                            "fsync",                 // the folder of these files
                            "getdents",              // the folder is still ours
                            "renameat", "renameat",  // no old one to move; publishes the new
                            "fsync",                 // the parent folder
                            "getdents", "renameat",  // nothing was replaced
                            "getdents"};
  CHECK(calls == expected);
}

TEST_CASE("A failing system call is an error with the file, and keeps the old checkpoint") {
  for (const long number : {SYS_mkdirat, SYS_pwrite64, SYS_fsync, SYS_renameat}) {
    const Folder folder;
    save(CheckpointStore(folder.path()), Sample(1).checkpoint);
    const int code = in_child([&] {
      forbid(number, ENOSPC);
      try {
        save(CheckpointStore(folder.path()), Sample(2).checkpoint);
      } catch (const base::Exception& exception) {
        const std::string& message = exception.error().message;
        const bool right = exception.kind() == base::ErrorKind::kResources &&
                           message.find(folder.path()) != std::string::npos &&
                           message.ends_with(": No space left on device");
        return right ? 1 : 2;
      }
      return 3;
    });
    if (code == kNoSeccomp) {
      WARN("no seccomp here");
      continue;
    }
    CHECK(code == 1);
    // The old checkpoint stays, and the failed save removes its partial files from the disk.
    CHECK(names_in(folder.path()) == Strings{step_name(1)});
    check_newest(folder.path(), Sample(1));
  }
}

TEST_CASE("A failed replacement leaves the old checkpoint under its name") {
  const Folder folder;
  save(CheckpointStore(folder.path()), Sample(1).checkpoint);
  // The second rename fails because its source was removed.
  const int code = in_child([&] {
    int renames = 0;
    CheckpointStore store(folder.path(), [&](const char* name) {
      if (name == std::string("renameat") && ++renames == 2) {
        fs::remove_all(folder.path(".tmp-" + step_name(1)));
      }
    });
    try {
      save(store, Sample(1, 1).checkpoint);
    } catch (const base::Exception& exception) {
      return exception.kind() == base::ErrorKind::kResources ? 1 : 2;
    }
    return 3;
  });
  CHECK(code == 1);
  CHECK(names_in(folder.path()) == Strings{step_name(1)});
  check_newest(folder.path(), Sample(1));
}

TEST_CASE("A full disk is an error with the file's name, and leaves no files") {
  const Folder folder;
  save(CheckpointStore(folder.path()), Sample(1).checkpoint);
  const int code = in_child([&] {
    signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{100'000, 100'000};
    setrlimit(RLIMIT_FSIZE, &limit);
    try {
      save(CheckpointStore(folder.path()), Sample(2, 0, 200'000).checkpoint);
    } catch (const base::Exception& exception) {
      const auto expected = "cannot write " + folder.path(".tmp-" + step_name(2)) +
                            "/model.safetensors: File too large";
      return exception.kind() == base::ErrorKind::kResources && expected == exception.what() ? 1
                                                                                             : 2;
    }
    return 3;
  });
  CHECK(code == 1);
  CHECK(names_in(folder.path()) == Strings{step_name(1)});
}

}  // namespace distrain::store
