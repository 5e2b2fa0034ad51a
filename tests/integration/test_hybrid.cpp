// ctest: timeout=120
#include "support/scenario_data.h"
#include "support/scenario_job.h"

using namespace distrain;
using namespace distrain::testing;
using scenario::HybridOptions;

namespace {

struct Trained {
  Finished job;
  NamedTensors parameters;
};

Trained train_hybrid(Place place, HybridOptions options) {
  const Folder folder;
  options.checkpoint = {folder.path(), kSaveAtEndOnly, ""};
  Trained trained;
  trained.job = run_job(place, options);
  trained.parameters = newest_checkpoint(folder.path()).files.at("model");
  REQUIRE(trained.parameters.size() == 3);
  return trained;
}

// Checks the parameters against a `--local` run, which may sum over trainers in another order.
void check_as_local(const Trained& trained, const HybridOptions& options) {
  check_close(trained.parameters, train_hybrid(Place::kLocal, options).parameters, 1e-5);
}

}  // namespace

TEST_CASE("sync training equals the one-process run in every parameter") {
  HybridOptions options;
  options.mode = "sync";
  options.epochs = 5;  // 50 steps
  std::tie(options.trainers, options.optimizer) =
      GENERATE(Catch::Generators::table<int, std::string>(
          {{1, "adam"}, {2, "sgd"}, {2, "adagrad"}, {3, "sgd"}, {3, "adam"}}));
  options.seed = 7;
  CAPTURE(options.trainers, options.optimizer);
  const Trained trained = train_hybrid(Place::kRanks, options);
  check_as_local(trained, options);
  const int ps = cmd::hybrid_job().roles(options).world_size() - 1;
  CHECK(trained.job.fields(ps)["updates"] == 50);
}

TEST_CASE("async training applies one update for each trainer and step") {
  HybridOptions options;
  options.epochs = 5;
  options.trainers = GENERATE(1, 2, 4);
  const Trained trained = train_hybrid(Place::kRanks, options);
  const int ps = cmd::hybrid_job().roles(options).world_size() - 1;
  CHECK(trained.job.fields(ps)["updates"] == 50 * options.trainers);
  CHECK(trained.job.fields(0)["steps"] == 50);
  // Rank 0 has received the results of the other ranks.
  const std::map<int, Json>& others = trained.job.outcomes.at(0).others;
  CHECK(std::ssize(others) == ps);
  CHECK(others.at(ps)["updates"] == 50 * options.trainers);
  CHECK(others.at(1).value("steps", 0) == (options.trainers > 1 ? 50 : 0));
  CHECK(trained.job.outcomes.at(ps).others.empty());
  // A step has at least three calls: lookup, backward, update.
  CHECK(trained.job.fields(0)["rpc"]["calls"] >= 150);
  if (options.trainers == 1) check_as_local(trained, options);
}

TEST_CASE("training on a file equals the one-process run and is evaluated on the whole test file") {
  const Folder folder;
  HybridOptions options;
  options.mode = "sync";
  options.epochs = 4;
  options.batch_size = 4;
  options.data = options.test_data = folder.write("examples", make_examples(60));
  options.optimizer = "adagrad";
  const Trained trained = train_hybrid(Place::kRanks, options);
  const Trained local = train_hybrid(Place::kLocal, options);
  check_close(trained.parameters, local.parameters, 1e-5);
  CHECK(trained.job.fields(0)["accuracy"] == local.job.fields(0)["accuracy"]);
  CHECK(trained.job.fields(0)["loss"].get<double>() ==
        Approx(local.job.fields(0)["loss"].get<double>()).margin(1e-5));
}

TEST_CASE("a hybrid job evaluates one set after each epoch and another at the end") {
  const testing::Folder folder;
  HybridOptions options;
  options.data = folder.write("examples", make_examples(60));
  options.valid_data = folder.write("valid", make_examples(21));
  options.test_data = folder.write("test", make_examples(33));
  options.epochs = 2;
  options.mode = "sync";
  const Place place = GENERATE(Place::kRanks, Place::kLocal);
  const Finished job = run_job(place, options);
  const std::vector<Json> lines = job.all("eval", 0);
  REQUIRE(lines.size() == 3);
  const std::vector<std::string> sets = {"valid", "valid", "test"};
  for (size_t i = 0; i < lines.size(); ++i) {
    CHECK(lines[i]["set"] == sets[i]);
    CHECK(lines[i]["samples"] == (sets[i] == "test" ? 33 : 21));
    CHECK(lines[i]["epoch"] == std::min<size_t>(i + 1, 2));
  }
  CHECK(lines[2]["step"] == 2 * lines[0]["step"].get<int>());
  CHECK(job.fields(0)["accuracy"] == lines[2]["accuracy"]);
}

TEST_CASE("the labels of a hidden teacher are learned by ranks as in one process") {
  HybridOptions options;
  options.data = HybridOptions::kTeacher;
  options.mode = "sync";
  options.epochs = 40;
  options.lr = 0.2;
  const Trained trained = train_hybrid(Place::kRanks, options);
  check_as_local(trained, options);
  const std::vector<Json> lines = trained.job.all("eval", 0);
  REQUIRE(lines.size() == 40);
  CHECK(lines.front()["accuracy"] < 0.4);
  CHECK(lines.back()["accuracy"] > 0.75);
  CHECK(lines.back()["loss"] < lines.front()["loss"]);
  CHECK(trained.job.fields(0)["accuracy"] == lines.back()["accuracy"]);
  CHECK_FALSE(trained.job.fields(0).contains("unknown_words"));
}

TEST_CASE("a hybrid job with a teacher resumes exactly; one with random labels is refused") {
  HybridOptions options;
  options.mode = "sync";
  options.data = HybridOptions::kTeacher;
  check_resume_is_exact(GENERATE(Place::kRanks, Place::kLocal), options, 12, 24);
  const Folder folder;
  options.checkpoint = {folder.path(), kSaveAtEndOnly, ""};
  options.steps = 3;
  run_job(Place::kLocal, options);
  options.data.clear();
  check_resume_refused(Place::kLocal, options, folder.path(), "saved while training on other data");
}

TEST_CASE("a hybrid job resumes exactly from the middle of an epoch") {
  HybridOptions options;
  options.mode = "sync";
  options.batches = 7;
  std::tie(options.trainers, options.optimizer) = GENERATE(
      Catch::Generators::table<int, std::string>({{1, "adagrad"}, {2, "sgd"}, {2, "adam"}}));
  const Place place = GENERATE(Place::kRanks, Place::kLocal);
  CAPTURE(options.trainers, options.optimizer, place);
  check_resume_is_exact(place, options, 12, 24);
}

TEST_CASE("a hybrid job on a file resumes exactly from the middle of an epoch") {
  const Folder folder;
  HybridOptions options;
  options.mode = "sync";
  options.batch_size = 4;  // 8 steps per epoch
  options.data = folder.write("examples", make_examples(60));
  options.optimizer = "adam";
  check_resume_is_exact(GENERATE(Place::kRanks, Place::kLocal), options, 11, 20);
}

TEST_CASE("a hybrid job saves at a given interval of steps, or at the end of each epoch") {
  const Place place = GENERATE(Place::kRanks, Place::kLocal);
  const int64_t every = GENERATE(0, 4);
  CAPTURE(place, every);
  const Folder folder;
  HybridOptions options;
  options.batches = 5;
  options.epochs = 2;
  options.checkpoint = {folder.path(), every, ""};
  std::vector<int64_t> steps;
  for (const Json& line : run_job(place, options).all("checkpoint")) {
    CHECK(line["action"] == "saved");
    steps.push_back(line["step"].get<int64_t>());
  }
  CHECK(steps == (every > 0 ? std::vector<int64_t>{4, 8, 10} : std::vector<int64_t>{5, 10}));
}

TEST_CASE("a hybrid job that is stopped saves, and resumes to the same end") {
  HybridOptions options;
  options.mode = "sync";
  options.batches = 7;
  options.steps = 120;
  options.optimizer = "adagrad";
  // The stop is requested on a trainer, the master or the server.
  SECTION("ranks") {
    check_stop_and_go_on(Place::kRanks, options, GENERATE(0, 1, 2, 3), 12, 0.003);
  }
  SECTION("one process") { check_stop_and_go_on(Place::kLocal, options, 0, 12); }
}

TEST_CASE("the checkpoint of another hybrid job is refused, naming the difference") {
  const Place place = GENERATE(Place::kRanks, Place::kLocal);
  CAPTURE(place);
  const Folder folder;
  HybridOptions options;
  options.steps = 3;
  options.checkpoint = {folder.path(), kSaveAtEndOnly, ""};
  run_job(Place::kLocal, options);
  const auto refused = [&](auto change, const std::string& why) {
    HybridOptions other = options;
    change(other);
    check_resume_refused(place, other, folder.path(), why);
  };
  refused([](auto& o) { o.trainers = 1; }, "saved with --trainers 2, not 1");
  refused([](auto& o) { o.mode = "sync"; }, "saved with --mode async, not sync");
  refused([](auto& o) { o.optimizer = "adam"; }, "saved with --optimizer sgd, not adam");
  refused([](auto& o) { o.seed = 2; }, "saved with --seed 1, not 2");
  refused([](auto& o) { o.num_embeddings = 99; }, "saved with --num-embeddings 100, not 99");

  check_spoilt_refused(
      place, options, folder.path(),
      {{[](Snapshot& s) { s.files["model"].erase("fc.bias"); }, "model.safetensors: no fc.bias"},
       {[](Snapshot& s) { s.files["model"]["fc.more"] = at::zeros({1}); }, "fc.more"},
       {[](Snapshot& s) { s.files["model"]["fc.bias"] = at::zeros({9}); }, "fc.bias"},
       {[](Snapshot& s) { s.files["optimizer"]["embedding.weight.x"] = at::zeros({1}); },
        "of another optimizer"},
       {[](Snapshot& s) { s.files.erase("optimizer"); }, "no optimizer.safetensors"},
       {[](Snapshot& s) { s.state["position"]["epoch"] = 0; }, "the position is"},
       {[](Snapshot& s) { s.state["position"] = 3; }, "the position is"}});
}

TEST_CASE("a checkpoint of a version without an option is resumed with the option's default") {
  const Place place = GENERATE(Place::kRanks, Place::kLocal);
  CAPTURE(place);
  HybridOptions options;
  options.steps = 3;
  const Folder folder;
  options.checkpoint = {folder.path(), kSaveAtEndOnly, ""};
  run_job(place, options);
  Snapshot older = newest_checkpoint(folder.path());
  older.state["options"].erase("task");
  older.state["options"].erase("dense");
  replace_checkpoint(folder.path(), older);
  options.checkpoint = {folder.path(), kSaveAtEndOnly, "auto"};
  options.steps = 5;
  run_job(place, options);
  CHECK(newest_checkpoint(folder.path()).step == 5);
  options.dense = {4};
  CHECK(contains(error_of_job(base::ErrorKind::kBadData, place, options).message,
                 "saved without --dense, not with 4"));
}

TEST_CASE("a binary task with hidden layers equals the one-process run, with its AUC") {
  const Folder folder;
  std::string examples;
  for (int i = 0; i < 80; ++i) {
    examples += std::string("__label__") + (i % 3 == 0 ? "yes" : "no");
    for (int k = 0; k < 4; ++k)
      examples += " w" + std::to_string((i * 13 + k * 29) % 20 + (i % 3 == 0 ? 0 : 15));
    examples += "\n";
  }
  HybridOptions options;
  options.task = "binary";
  options.dense = {8, 4};
  options.mode = "sync";
  options.epochs = 6;
  options.batch_size = 4;
  options.data = options.test_data = folder.write("examples", examples);
  options.optimizer = "adagrad";
  options.lr = 0.2;
  const Snapshot ranks = checkpoint_of(Place::kRanks, options);
  const Snapshot local = checkpoint_of(Place::kLocal, options);
  REQUIRE(local.file("model").size() == 7);
  CHECK(local.file("model").at("fc.weight").sizes() == at::IntArrayRef({1, 4}));
  CHECK(local.file("model").at("fc.hidden0.weight").sizes() == at::IntArrayRef({8, 16}));
  check_close(ranks.file("model"), local.file("model"), 1e-5);
  const Finished job = run_job(Place::kRanks, options);
  const double auc = job.all("eval", 0).back()["auc"].get<double>();
  CHECK(auc > 0.9);
  CHECK(job.fields(0)["auc"] == auc);
  CHECK(run_job(Place::kLocal, options).fields(0)["auc"].get<double>() == Approx(auc).margin(1e-3));

  options.data = folder.write("three", make_examples(60));
  options.test_data.clear();
  CHECK(contains(error_of_job(base::ErrorKind::kBadData, Place::kLocal, options).message,
                 "the number of labels is 3; --task binary needs 2"));
}
