// ctest: timeout=120
// Tests hybrid jobs whose training data is streamed: trainers with shards of different lengths
// against one process, and resumed jobs against undisturbed ones.
#include "support/scenario_data.h"
#include "support/scenario_job.h"

using namespace distrain;
using namespace distrain::testing;
using scenario::HybridOptions;

namespace {

// Writes `lines` lines of a label and up to six of 30 words, whose numbers tell the label.
void write_examples(const Folder& folder, const std::string& name, int lines, uint64_t seed) {
  base::Random random({seed});
  std::string text;
  for (int line = 0; line < lines; ++line) {
    const uint64_t label = random.below(2);
    text += "__label__" + std::to_string(label);
    for (uint64_t left = random.between(1, 6); left > 0; --left) {
      text += " w" + std::to_string(random.below(4) > 0 ? 15 * label + random.below(15)
                                                        : random.below(30));
    }
    text += "\n";
  }
  folder.write(name, text);
}

// Three gzip files, of which each trainer reads one: 12, 5 and 2 batches of 16 examples.
HybridOptions uneven(const Folder& folder) {
  int file = 0;
  for (const int lines : {190, 80, 20}) {
    const std::string name = "part" + std::to_string(++file);
    write_examples(folder, name, lines, static_cast<uint64_t>(file));
    REQUIRE(std::system(("gzip " + folder.path() + "/" + name).c_str()) == 0);
  }
  write_examples(folder, "test", 100, 9);
  HybridOptions options;
  options.data = folder.path() + "/part?.gz";
  options.test_data = folder.path() + "/test";
  options.trainers = 3;
  options.batch_size = 16;
  options.shuffle_buffer = 50;
  options.embedding_dim = 4;
  options.task = "binary";
  options.optimizer = "adagrad";
  options.epochs = 2;
  options.mode = "sync";
  return options;
}

struct StreamRun {
  Finished job;
  NamedTensors model;
};

StreamRun train_streams(Place place, HybridOptions options, const Folder& folder) {
  options.checkpoint.dir = folder.path();
  options.checkpoint.every = kSaveAtEndOnly;
  StreamRun trained;
  trained.job = run_job(place, options);
  trained.model = newest_checkpoint(folder.path()).files.at("model");
  return trained;
}

}  // namespace

TEST_CASE("trainers with shards of different lengths train as one process") {
  const Folder data;
  HybridOptions options = uneven(data);
  std::tie(options.table, options.servers, options.hash_bits, options.clip, options.average_over) =
      GENERATE(Catch::Generators::table<std::string, int, int, double, std::string>(
          {{"module", 1, 0, 0, "data"},
           {"module", 1, 0, 0.05, "trainers"},
           {"sharded", 2, 20, 0.05, "data"},
           {"sharded", 1, 20, 0, "trainers"}}));
  options.data_from = GENERATE("each", "rank0");
  CAPTURE(options.table, options.clip, options.average_over, options.data_from);
  const Folder a, b;
  const StreamRun local = train_streams(Place::kLocal, options, a);
  const StreamRun ranks = train_streams(Place::kRanks, options, b);
  check_close(ranks.model, local.model, 1e-6);
  for (const char* name : {"loss", "accuracy", "auc"}) {
    CAPTURE(name);
    CHECK(ranks.job.fields(0)[name].get<double>() ==
          Approx(local.job.fields(0)[name].get<double>()).margin(1e-6));
  }
  int64_t steps = 0;
  for (int trainer = 0; trainer < 3; ++trainer) {
    steps += ranks.job.fields(trainer)["steps"].get<int64_t>();
  }
  CHECK(steps == 2 * (12 + 5 + 2));  // from rank 0: 7, 6 and 6 batches of all 290 examples
  CHECK(local.job.fields(0)["steps"] == steps);
}

TEST_CASE("a job on streams resumes at any step with the same bits") {
  const Folder data, whole;
  HybridOptions options = uneven(data);
  options.data_from = GENERATE("each", "rank0");
  const StreamRun undisturbed = train_streams(Place::kRanks, options, whole);
  for (const int64_t steps : {1, 4, 7, 9, 12}) {
    CAPTURE(steps);
    const Folder folder;
    HybridOptions first = options;
    first.steps = steps;
    first.epochs = 0;
    train_streams(Place::kRanks, first, folder);
    HybridOptions rest = options;
    rest.checkpoint.resume = folder.path();
    const StreamRun resumed = train_streams(Place::kRanks, rest, folder);
    check_close(resumed.model, undisturbed.model, 0);
    CHECK(resumed.job.fields(0)["eval"] == undisturbed.job.fields(0)["eval"]);
  }
}

TEST_CASE("a checkpoint of streams is refused with data in memory, and the other way round") {
  const Folder data, folder;
  write_examples(data, "one", 100, 1);
  HybridOptions options;
  options.data = data.path() + "/one";
  options.epochs = 1;
  options.in_memory = GENERATE("0", "1MB");
  train_streams(Place::kRanks, options, folder);
  options.checkpoint.resume = folder.path();
  options.in_memory = options.in_memory == "0" ? "1MB" : "0";
  options.epochs = 2;
  CHECK(contains(error_of_job(base::ErrorKind::kBadData, Place::kRanks, options).message,
                 "saved while training on other data"));
}
