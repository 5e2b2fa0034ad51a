#include <filesystem>
#include <fstream>
#include <optional>
#include <string>

#include <unistd.h>

#include "distrain/base/trace.h"
#include "distrain/job/training.h"
#include "support/catch.h"

using namespace distrain;
using namespace distrain::job;

namespace {

class NoSink final : public EventSink {
 public:
  void emit(std::string_view event, const Json&) override { FAIL(event); }
  void joined(std::string_view, const OptionMap&) override {}
};

class TracePath {
 public:
  TracePath()
      : path_(std::filesystem::temp_directory_path() /
              ("distrain_trace_" + std::to_string(getpid()) + ".json")) {}
  ~TracePath() { std::filesystem::remove(path_); }
  std::string text() const { return path_.string(); }
  bool exists() const { return std::filesystem::exists(path_); }
  Json read() const { return Json::parse(std::ifstream(path_)); }

 private:
  std::filesystem::path path_;
};

}  // namespace

TEST_CASE("A local job that fails leaves its trace and its error", "[trace]") {
  const TracePath path;
  NoSink sink;
  Job job;
  job.effective["trace"] = path.text();
  const auto fails = [](const Job&) {
    const base::TraceScope scope("failing");
    throw base::Exception(base::ErrorKind::kNotFinite, "the loss is NaN");
    return Outcome();
  };
  CHECK_THROWS_WITH(run_local_job(job, sink, fails), "the loss is NaN");
  CHECK(path.read()["traceEvents"].back()["name"] == "failing");
  // If that cannot be written either, the job's error counts.
  job.effective["trace"] = "/nowhere/t.json";
  CHECK_THROWS_WITH(run_local_job(job, sink, fails), "the loss is NaN");
  const auto works = [](const Job&) { return Outcome(); };
  const Outcome outcome = run_local_job(job, sink, works);
  REQUIRE(outcome.afterwards);
  CHECK(outcome.afterwards->kind == base::ErrorKind::kResources);
  CHECK(outcome.afterwards->message == "cannot write /nowhere/t.json: No such file or directory");
}
