// ctest: labels=ci timeout=180
// Tests whole jobs whose ranks compute on fake devices: their losses equal those on the CPU, and no
// tensor is copied unnecessarily.
#include "support/fake_device.h"
#include "support/scenario_data.h"
#include "support/scenario_job.h"

using namespace distrain;
using namespace distrain::testing;
using scenario::HybridOptions;
using scenario::PipelineOptions;
using scenario::PsOptions;
using scenario::RlOptions;
using scenario::RnnOptions;

namespace {

constexpr double kTolerance = 1e-6;

using Devices = std::vector<c10::Device>;
using DevicesOf = std::function<Devices(int rank)>;

template <class Options>
Hooks<Options> placed(const DevicesOf& devices) {
  Hooks<Options> hooks;
  hooks.job = [devices](Job& job) { job.devices = devices(job.rank); };
  return hooks;
}

Devices only_cpu(int) { return {c10::kCPU}; }
Devices each_its_own(int rank) { return {fake(rank % kFakeDevices)}; }
Devices all_on_one(int) { return {fake(1)}; }

/// Puts rank `on_the_cpu` on the CPU and each other rank on a device. only() does the opposite.
DevicesOf but(int on_the_cpu) {
  return
      [on_the_cpu](int rank) { return rank == on_the_cpu ? only_cpu(rank) : each_its_own(rank); };
}
DevicesOf only(int on_a_device) {
  return
      [on_a_device](int rank) { return rank == on_a_device ? Devices{fake(2)} : only_cpu(rank); };
}

/// Returns for each rank the losses of its steps, in order.
std::map<int, std::vector<double>> losses(const Finished& job) {
  std::map<int, std::vector<double>> found;
  for (const Line& line : job.lines) {
    if (line.event == "step") found[line.rank].push_back(line.fields["loss"].get<double>());
  }
  return found;
}

void check_same_losses(const Finished& job, const Finished& expected, size_t steps) {
  const auto mine = losses(job), theirs = losses(expected);
  REQUIRE(!theirs.empty());
  REQUIRE(mine.size() == theirs.size());
  for (const auto& [rank, values] : theirs) {
    REQUIRE(values.size() == steps);
    REQUIRE(mine.at(rank).size() == steps);
    for (size_t i = 0; i < steps; ++i) {
      CAPTURE(rank, i);
      CHECK(mine.at(rank)[i] == Approx(values[i]).margin(kTolerance));
    }
  }
}

template <class Options>
Finished run_on(const DevicesOf& devices, const Options& options, Place place = Place::kRanks) {
  return run_job(place, options, placed<Options>(devices));
}

/// Checks for each choice of devices that a job's losses equal those of the same job on the CPU.
template <class Options>
void check_as_on_the_cpu(Options options, const std::vector<DevicesOf>& places, size_t steps) {
  options.log_interval = 1;
  const Finished expected = run_on(only_cpu, options);
  for (const DevicesOf& devices : places) {
    check_same_losses(run_on(devices, options), expected, steps);
  }
  check_same_losses(run_on(all_on_one, options, Place::kLocal),
                    run_on(only_cpu, options, Place::kLocal), steps);
}

/// Checks that a job saved on devices and resumed on the CPU gives the same results, and vice
/// versa.
template <class Options>
void check_goes_on_elsewhere(Options options, int64_t half, int64_t whole) {
  options.steps = whole;
  const Snapshot expected = checkpoint_of(Place::kRanks, options);
  const DevicesOf devices[] = {each_its_own, only_cpu};
  for (const int first : {0, 1}) {
    CAPTURE(first);
    const Folder folder;
    options.checkpoint = {folder.path(), kSaveAtEndOnly, "auto"};
    options.steps = half;
    run_on(devices[first], options);
    options.steps = whole;
    run_on(devices[1 - first], options);
    const Snapshot snapshot = newest_checkpoint(folder.path());
    REQUIRE(snapshot.step == whole);
    for (const auto& [file, tensors] : expected.files) {
      CAPTURE(file);
      check_close(snapshot.files.at(file), tensors, kTolerance);
    }
  }
}

HybridOptions hybrid() {
  HybridOptions options;
  options.mode = "sync";
  options.steps = 20;
  return options;
}

PsOptions ps(const Folder& folder) {
  write_images(folder, 64, 16, 1);
  PsOptions options;
  options.data = folder.path();
  options.batch_size = 4;
  options.epochs = 10;
  options.mode = "sync";
  options.steps = 20;
  return options;
}

RnnOptions rnn(const Folder& folder) {
  RnnOptions options;
  options.data = folder.write("train", make_text(60, 1));
  options.valid_data = folder.write("valid", make_text(10, 2));
  options.trainers = 2;
  options.batch_size = 2;
  options.bptt = 4;
  options.vocab_size = 20;
  options.nlayers = 2;
  options.clip = 0.25;
  options.mode = "sync";
  options.steps = 6;
  return options;
}

/// Numbers of copies from devices, to devices, and between two devices, of all ranks together.
struct Copies {
  int64_t out = 0;
  int64_t in = 0;
  int64_t across = 0;
  bool operator==(const Copies&) const = default;
};
std::ostream& operator<<(std::ostream& out, const Copies& copies) {
  return out << copies.out << " out, " << copies.in << " in, " << copies.across << " across";
}

/// Returns the copies per step, computed from the difference between a long and a short job.
template <class Options>
Copies copies_a_step(const DevicesOf& devices, Options options) {
  constexpr int64_t kShort = 2, kLong = 7;
  const auto copies_of = [&](int64_t steps) {
    options.steps = steps;
    run_all_fake_streams();
    reset_fake_device_counters();
    run_on(devices, options);
    const FakeDeviceCounters counters = fake_device_counters();
    return Copies{counters.device_to_host.number, counters.host_to_device.number,
                  counters.device_to_device.number};
  };
  const Copies few = copies_of(kShort), many = copies_of(kLong);
  constexpr int64_t kSteps = kLong - kShort;
  const Copies more{many.out - few.out, many.in - few.in, many.across - few.across};
  REQUIRE(more.out % kSteps == 0);
  REQUIRE(more.in % kSteps == 0);
  REQUIRE(more.across % kSteps == 0);
  return {more.out / kSteps, more.in / kSteps, more.across / kSteps};
}

}  // namespace

TEST_CASE("a step of hybrid or ps makes no unnecessary copy") {
  const Folder folder;
  // Each of two trainers copies the embedding, its gradient and a bucket to the host. It copies the
  // same three tensors and three tensors of the batch to its device.
  CHECK(copies_a_step(each_its_own, hybrid()) == Copies{2 * 3, 2 * (3 + 3), 0});
  // Out: scores and their gradient. In: both, and on the trainer images, targets and dropout masks.
  CHECK(copies_a_step(each_its_own, ps(folder)) == Copies{2 * 2, 2 * (2 + 4), 0});
  // The server copies only the scores and their gradient; the trainers compute on the CPU.
  CHECK(copies_a_step(only(0), ps(folder)) == Copies{2 * 1, 2 * (1 + 3), 0});
}

TEST_CASE("a job on the second device creates no context on the first, including its saves") {
  const Folder folder;
  HybridOptions options = hybrid();
  options.checkpoint = {folder.path(), 5, "auto"};
  for (const Place place : {Place::kRanks, Place::kLocal}) {
    reset_fake_contexts();
    run_on(all_on_one, options, place);
    CHECK(fake_contexts(0) == "");
    CHECK(fake_contexts(1).find("checkpoint") != std::string::npos);
    options.steps = 40;
  }
}

TEST_CASE("hybrid on devices learns what it learns on the CPU") {
  HybridOptions options = hybrid();
  options.optimizer = GENERATE("sgd", "adagrad", "adam");
  check_as_on_the_cpu(options, {each_its_own, but(3), only(3)}, 20);
}

TEST_CASE("a hybrid job resumes on another kind of device") {
  HybridOptions options = hybrid();
  options.optimizer = "adam";
  check_goes_on_elsewhere(options, 3, 6);
}

TEST_CASE("ps on devices learns what it learns on the CPU") {
  const Folder folder;
  const DevicesOf two_for_the_server = [](int rank) {
    return rank == 0 ? Devices{fake(0), fake(3)} : each_its_own(rank);
  };
  const DevicesOf two_and_no_more = [](int rank) {
    return rank == 0 ? Devices{fake(0), fake(3)} : only_cpu(rank);
  };
  PsOptions options = ps(folder);
  check_as_on_the_cpu(options, {each_its_own, but(0), only(0), two_for_the_server, two_and_no_more},
                      20);
  options.verify_grads = true;
  options.steps = 2;
  run_on(two_and_no_more, options);
}

TEST_CASE("a ps job resumes on another kind of device") {
  const Folder folder;
  check_goes_on_elsewhere(ps(folder), 2, 4);
}

TEST_CASE("rnn on devices learns what it learns on the CPU") {
  const Folder folder;
  check_as_on_the_cpu(rnn(folder), {each_its_own, but(0), only(0)}, 6);
}

TEST_CASE("an rnn job resumes on another kind of device") {
  const Folder folder;
  check_goes_on_elsewhere(rnn(folder), 2, 4);
}

TEST_CASE("pipeline on devices learns what it learns on the CPU") {
  PipelineOptions options = small_pipeline(3, 4);
  options.num_split = {2};
  options.loss = "ce";  // mse_loss, the default, resizes its output on the CPU
  const DevicesOf both_on_one = [](int rank) { return rank == 0 ? only_cpu(0) : all_on_one(rank); };
  options.log_interval = 1;
  const Finished expected = run_on(only_cpu, options);
  for (const DevicesOf& devices :
       std::vector<DevicesOf>{each_its_own, but(0), but(1), but(2), only(0), both_on_one}) {
    const Finished job = run_on(devices, options);
    const auto mine = losses(job).at(0), theirs = losses(expected).at(0);
    REQUIRE(mine.size() == 3);
    // The tolerance is 1e-3, because batch norm over few values amplifies rounding.
    for (size_t i = 0; i < 3; ++i) CHECK(mine[i] == Approx(theirs[i]).epsilon(1e-3));
  }
}

TEST_CASE("rl on a device plays the CPU's episodes") {
  RlOptions options;
  options.max_episodes = 4;
  options.max_steps = 60;
  options.log_interval = 1;
  options.envs_per_observer = 3;
  const auto rewards = [&](const DevicesOf& devices, Place place) {
    std::vector<Json> found;
    for (const Json& line : run_on(devices, options, place).all("episode")) {
      found.push_back({line["episode"], line["reward"], line["steps"]});
    }
    REQUIRE(found.size() == 4);
    return found;
  };
  const auto expected = rewards(only_cpu, Place::kRanks);
  CHECK(rewards(only(0), Place::kRanks) == expected);
  CHECK(rewards(all_on_one, Place::kLocal) == expected);
}
