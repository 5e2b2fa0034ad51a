// Tests that a failure of a device is a `resources` error and names the rank.
#include <c10/util/Exception.h>

#include "distrain/job/device_choice.h"
#include "distrain/rpc/error.h"
#include "support/cluster.h"
#include "support/fake_device.h"
#include "support/scenario_job.h"

using namespace distrain;
using namespace distrain::testing;
using scenario::HybridOptions;
using scenario::RnnOptions;

namespace {

/// Checks that all ranks fail with the out-of-memory error of `rank`, the only rank with a device.
template <class Options>
void check_names_rank(const Options& options, int rank, const std::string& name) {
  const FakeDeviceMemoryLimit none(0);
  Hooks<Options> hooks;
  hooks.job = [rank](Job& job) {
    if (job.rank == rank) job.devices = {fake(2)};
  };
  const Finished job = try_job(Place::kRanks, options, hooks);
  REQUIRE(job.outcomes.empty());
  const std::string words =
      "rank " + std::to_string(rank) + " (" + name + "): fake:2 is out of memory";
  for (const auto& [who, error] : job.errors) {
    CAPTURE(who, error.message);
    CHECK(base::kind_name(error.kind) == base::kind_name(base::ErrorKind::kResources));
    CHECK(error.rank == rank);
    CHECK(error.message.starts_with(words));
  }
}

[[noreturn]] void report_failure() {
  throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, 46,
                              "CUDA error: all devices are busy\nFor debugging consider this.");
}

base::Error caught() {
  try {
    report_failure();
  } catch (...) {
    return rpc::error_in_flight(base::ErrorKind::kInternal);
  }
  return {};
}

}  // namespace

TEST_CASE("a device without memory ends the job with an error that names its rank") {
  check_names_rank(RnnOptions(), 1, "trainer1");  // fails in the trainer's own work
  check_names_rank(RnnOptions(), 0, "ps");        // fails in a call from a trainer
  check_names_rank(HybridOptions(), 0, "trainer0");
  check_names_rank(HybridOptions(), 3, "ps");
}

TEST_CASE("an error of an accelerator's runtime is a resources error") {
  const base::Error error = caught();
  CHECK(base::kind_name(error.kind) == base::kind_name(base::ErrorKind::kResources));
  CHECK(error.message == "CUDA error: all devices are busy");
}

TEST_CASE("any error while devices are looked for names the rank once") {
  const auto choose = []() -> std::vector<c10::Device> { report_failure(); };
  const base::Error error = error_of([&] { job::naming_rank(12, "trainer11", choose); });
  CHECK(error.rank == 12);
  CHECK(error.message == "rank 12 (trainer11): CUDA error: all devices are busy");
  CHECK(job::error_of_rank(error, 12, "trainer11").message == error.message);
  CHECK(job::error_of_rank(error, 12, "").message == error.message);
  CHECK(job::error_of_rank(error, 1, "ps").message == "rank 1 (ps): " + error.message);
  CHECK(job::error_of_rank({base::ErrorKind::kResources, "no disk", -1, {}}, 1, "").message ==
        "rank 1: no disk");
}
