// Tests saves that are written while the job continues.
#include <atomic>
#include <chrono>
#include <cmath>
#include <csignal>
#include <filesystem>
#include <functional>
#include <limits>
#include <set>
#include <thread>
#include <utility>

#include <ATen/Functions.h>
#include <sys/resource.h>

#include "distrain/base/clock.h"
#include "distrain/job/checkpoints.h"
#include "support/catch.h"
#include "support/files.h"

using namespace distrain;
using namespace distrain::job;
using testing::error_of;
using testing::Folder;

namespace {

class Lines final : public EventSink {
 public:
  void emit(std::string_view event, const Json& fields) override {
    std::lock_guard lock(mutex_);
    if (event == "checkpoint") saved_.push_back(fields);
    if (event == "warn") warnings_.push_back(fields["message"]);
  }
  void joined(std::string_view, const OptionMap&) override {}
  std::vector<Json> saved() const {
    std::lock_guard lock(mutex_);
    return saved_;
  }
  std::vector<std::string> warnings() const {
    std::lock_guard lock(mutex_);
    return warnings_;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<Json> saved_;
  std::vector<std::string> warnings_;
};

struct Saving {
  explicit Saving(std::function<bool()> before_save = {},
                  const std::string& on_save_error = "continue") {
    Job job;
    job.inject.before_save = std::move(before_save);
    CheckpointOptions options{folder.path("saves"), 0, ""};
    options.on_save_error = on_save_error;
    checkpoints.emplace(options, job, lines,
                        [this](const base::Error& error) { told.push_back(error); });
  }

  static Content content(int64_t step, double value = 1) {
    return content_of(step, at::full({100'000}, value));
  }
  static Content content_of(int64_t step, const at::Tensor& x) {
    Content content{.step = step};
    content.files["model"] = {HeldTensor::of("x", x, /*trained=*/true),
                              HeldTensor::of("mask", at::full({3}, -INFINITY))};
    return content;
  }
  std::optional<std::string> newest() const {
    return store::CheckpointStore::newest(folder.path("saves"));
  }

  const Folder folder;
  Lines lines;
  std::vector<base::Error> told;  // written by the saving thread
  std::optional<Checkpoints> checkpoints;
};

}  // namespace

TEST_CASE("a save continues in the background") {
  Saving saving;
  base::Promise<void> go_on;
  const auto fill = [may = go_on.future()](Content& content) {
    may.wait();
    content.files["state"] = {HeldTensor::of("y", at::ones({3}))};
  };
  saving.checkpoints->save(Saving::content(4), fill, base::Clock::now());
  const base::Future<void> idle = saving.checkpoints->idle();
  CHECK_FALSE(idle.done());
  CHECK_FALSE(saving.newest());
  CHECK(saving.checkpoints->last_saved().empty());
  go_on.set();
  saving.checkpoints->finish();
  CHECK(idle.done());
  REQUIRE(saving.lines.saved().size() == 1);
  const Json line = saving.lines.saved()[0];
  CHECK(line["step"] == 4);
  CHECK(line["held_s"].get<double>() <= line["wall_s"].get<double>());
  const Snapshot read = read_checkpoint(saving.folder.path("saves"));
  CHECK(read.file("model").tensor("x").sum().item<double>() == 100'000);
  CHECK(read.file("state").tensor("y").numel() == 3);
  CHECK(saving.checkpoints->last_saved().find("step 4") != std::string::npos);
}

TEST_CASE("values that are not finite are not saved, and a later save works") {
  Saving saving;
  // Changes the last element, because the check must read all pieces of the tensor.
  const at::Tensor bad = at::ones({3'000'000});
  bad[-1] =
      GENERATE(std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN());
  saving.checkpoints->save(Saving::content_of(1, bad), {}, base::Clock::now());
  const std::string why =
      error_of(base::ErrorKind::kNotFinite, [&] { saving.checkpoints->finish(); });
  CHECK(why.find("x is not finite at step 1, so it was not saved") == 0);
  REQUIRE(saving.told.size() == 1);
  CHECK(saving.told[0].message == why);
  CHECK_FALSE(saving.newest());
  saving.checkpoints->save(Saving::content(2), {}, base::Clock::now());
  saving.checkpoints->finish();
  CHECK(saving.newest());
  CHECK(saving.told.size() == 1);
}

TEST_CASE("a save that fails on a full disk keeps the older checkpoint, and the next save works") {
  const std::string on_save_error = GENERATE("continue", "stop");
  CAPTURE(on_save_error);
  Saving saving({}, on_save_error);
  const auto save = [&](int64_t step) {
    saving.checkpoints->save(Saving::content(step), {}, base::Clock::now());
    saving.checkpoints->finish();
  };
  save(1);
  const std::string saves = saving.folder.path("saves"), first = saving.newest().value();
  // A write in the middle of a file fails, as on a full disk.
  const auto handler = signal(SIGXFSZ, SIG_IGN);
  rlimit limit{};
  getrlimit(RLIMIT_FSIZE, &limit);
  const rlim_t before = std::exchange(limit.rlim_cur, 100'000);
  setrlimit(RLIMIT_FSIZE, &limit);
  const std::string why = error_of(base::ErrorKind::kResources, [&] { save(2); });
  limit.rlim_cur = before;
  setrlimit(RLIMIT_FSIZE, &limit);
  signal(SIGXFSZ, handler);
  CHECK(why == "saving step 2 in " + saves + " failed: cannot write " + saves +
                   "/.tmp-step-000000000002/model.safetensors: File too large; the last good "
                   "checkpoint is " +
                   first);
  CHECK(saving.newest() == first);
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(saves)) {
    names.insert(entry.path().filename());
  }
  CHECK(names == std::set<std::string>{".lock", "step-000000000001"});
  if (on_save_error == "stop") {
    REQUIRE(saving.told.size() == 1);
    CHECK(saving.told[0].message == why);
  } else {
    CHECK(saving.told.empty());
    CHECK(saving.lines.warnings() ==
          std::vector{why + "; the job goes on and tries its next save"});
  }
  save(3);
  CHECK(read_checkpoint(saves).step == 3);
}

TEST_CASE("resuming from a checkpoint that is older than the newest is refused") {
  Saving saving;
  for (const int64_t step : {1, 2}) {
    saving.checkpoints->save(Saving::content(step), {}, base::Clock::now());
    saving.checkpoints->finish();
  }
  saving.checkpoints.reset();
  const std::string folder = saving.folder.path("saves"), newest = saving.newest().value();
  const std::string older = std::filesystem::path(newest).parent_path() / "step-000000000001";
  const auto going_on_from = [&](const std::string& resume, bool read_only = false) {
    Checkpoints checkpoints({folder, 0, resume, 2, read_only}, Job(), saving.lines);
    return checkpoints.load().value().step;
  };
  const std::string why = error_of(base::ErrorKind::kInvalid, [&] { going_on_from(older); });
  CHECK(why.starts_with("--resume " + older + " is older than step-000000000002 in --checkpoint "));
  CHECK(going_on_from(older, true) == 1);
  for (const auto& resume : {std::string("auto"), folder, newest, newest + "/"}) {
    CHECK(going_on_from(resume) == 2);
  }
}

TEST_CASE("the error of a part that is unavailable is the error of the save") {
  Saving saving;
  const auto fill = [](Content&) {
    throw base::Exception(base::ErrorKind::kPeerLost, "rank 3 is gone");
  };
  saving.checkpoints->save(Saving::content(1), fill, base::Clock::now());
  CHECK(error_of(base::ErrorKind::kPeerLost, [&] { saving.checkpoints->finish(); }) ==
        "rank 3 is gone");
  CHECK(saving.lines.saved().empty());
}

TEST_CASE("destroying Checkpoints waits for the save in progress") {
  Saving saving([] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    return false;
  });
  saving.checkpoints->save(Saving::content(7), {}, base::Clock::now());
  saving.checkpoints.reset();
  CHECK(saving.lines.saved().size() == 1);
  CHECK(read_checkpoint(saving.folder.path("saves")).step == 7);
}
