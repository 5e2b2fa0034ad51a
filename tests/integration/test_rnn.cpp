// ctest: labels=ci timeout=180
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <set>
#include <sstream>

#include "support/scenario_data.h"
#include "support/scenario_job.h"

using namespace distrain;
using namespace distrain::testing;
using scenario::RnnOptions;

namespace {

constexpr double kNothing = 1e-20;  // so small that it changes no weight

std::vector<double> values_of(const std::vector<Json>& lines, const char* field) {
  std::vector<double> values;
  for (const Json& line : lines) values.push_back(line[field].get<double>());
  return values;
}

/// Returns the losses of all steps, in an order that does not depend on the timing of the trainers.
std::multiset<double> losses_of(const Finished& job) {
  const std::vector<double> losses = values_of(job.all("step"), "loss");
  return {losses.begin(), losses.end()};
}

void check_perplexity(const Json& line) {
  CAPTURE(line.dump());
  CHECK(line["perplexity"].get<double>() == Approx(std::exp(line["loss"].get<double>())));
}

}  // namespace

TEST_CASE_METHOD(RnnText, "sync training on text equals the one-process run over several epochs") {
  RnnOptions options = on_text();
  const auto [trainers, clip, dropout] = GENERATE(Catch::Generators::table<int, double, double>(
      {{1, 0.05, 0.2}, {2, 0, 0}, {2, 0.05, 0.2}, {3, 0, 0.2}, {3, 0.05, 0}}));
  options.trainers = trainers;
  options.clip = clip;
  options.dropout = dropout;  // --local has the same masks
  options.steps = 30;
  CAPTURE(options.trainers, options.clip, options.dropout);
  const Snapshot ranks = checkpoint_of(Place::kRanks, options);
  const Snapshot local = checkpoint_of(Place::kLocal, options);
  CHECK(ranks.step == 30);
  CHECK(ranks.state["position"] == local.state["position"]);
  CHECK(ranks.state["position"]["epoch"] > 1);
  check_close(ranks.file("model"), local.file("model"), 1e-5);
  check_close(ranks.file("state"), local.file("state"), 1e-5);
}

TEST_CASE_METHOD(RnnText, "sync training on random words equals the one-process run") {
  RnnOptions options = on_random();
  const auto [trainers, clip, dropout] = GENERATE(Catch::Generators::table<int, double, double>(
      {{1, 0.05, 0.5}, {2, 0, 0}, {2, 0.05, 0.5}, {3, 0, 0.5}, {3, 0.05, 0}}));
  options.trainers = trainers;
  options.clip = clip;
  options.dropout = dropout;
  options.steps = 16;
  CAPTURE(options.trainers, options.clip, options.dropout);
  check_close(checkpoint_of(Place::kRanks, options).file("model"),
              checkpoint_of(Place::kLocal, options).file("model"), 1e-5);
}

TEST_CASE_METHOD(RnnText, "one async trainer equals the one-process run, too") {
  RnnOptions options = GENERATE(false, true) ? on_text() : on_random();
  options.mode = "async";
  options.steps = 16;
  check_close(checkpoint_of(Place::kRanks, options).file("model"),
              checkpoint_of(Place::kLocal, options).file("model"), 1e-5);
}

TEST_CASE_METHOD(RnnText, "clipping keeps a step within its norm") {
  const Place place = GENERATE(Place::kRanks, Place::kLocal);
  CAPTURE(place);
  RnnOptions options = on_text();
  options.trainers = 2;
  options.dropout = 0;
  options.lr = kNothing;
  options.steps = 1;
  const NamedTensors before = checkpoint_of(place, options).file("model");
  options.lr = 1;
  const auto moved = [&](double clip) {
    options.clip = clip;
    const Snapshot after = checkpoint_of(place, options);
    double squared = 0;
    for (const auto& [name, tensor] : after.file("model")) {
      squared += (tensor - before.at(name)).to(at::kDouble).square().sum().item<double>();
    }
    return std::sqrt(squared);
  };
  const double free = moved(0);
  REQUIRE(free > 0.05);
  CHECK(moved(100) == Approx(free));
  CHECK(moved(0.05) == Approx(0.05).epsilon(1e-3));
}

TEST_CASE_METHOD(RnnText, "async trainers of the language model make all their steps") {
  RnnOptions options = GENERATE(false, true) ? on_text() : on_random();
  options.mode = "async";
  options.trainers = 3;
  options.clip = 0.25;
  options.steps = 15;
  const Finished job = run_job(Place::kRanks, options);
  CHECK(job.fields(0)["updates"] == 45);
  for (int rank = 1; rank <= 3; ++rank) CHECK(job.fields(rank)["steps"] == 15);
}

TEST_CASE_METHOD(RnnText, "the language model learns, and its lines show it") {
  const Place place = GENERATE(Place::kRanks, Place::kLocal);
  CAPTURE(place);
  RnnOptions options = on_text();
  options.trainers = 2;
  options.epochs = 6;
  options.clip = 0.25;
  options.log_interval = 5;
  const Finished job = run_job(place, options);
  const std::vector<Json> evals = job.all("eval"), epochs = job.all("epoch");
  REQUIRE(evals.size() == 6);
  REQUIRE(epochs.size() == (place == Place::kLocal ? 6 : 12));
  for (const Json& line : evals) {
    check_perplexity(line);
    CHECK(line["words"] == evals[0]["words"]);
  }
  for (const Json& line : epochs) check_perplexity(line);
  for (const Json& line : job.all("step")) CHECK(line["words_per_s"] > 0);
  CHECK(evals.back()["perplexity"] < 21);  // a model that has learned nothing has 25
  CHECK(job.fields(0)["eval"] == evals.back());
  CHECK(job.fields(place == Place::kLocal ? 0 : 1)["words_per_s"] > 0);
}

TEST_CASE_METHOD(RnnText, "validation covers all columns, however many trainers share them") {
  RnnOptions options = on_text();
  // In a text of two words there is one word to predict, so only one of several trainers has data.
  if (GENERATE(false, true)) options.valid_data = folder.write("few.txt", "w1 w2\n");
  options.lr = kNothing;
  options.epochs = 1;
  std::vector<double> losses, samples;
  for (const int trainers : {1, 2, 3}) {
    options.trainers = trainers;
    for (const Place place : {Place::kRanks, Place::kLocal}) {
      const Json eval = run_job(place, options).all("eval").at(0);
      losses.push_back(eval["loss"].get<double>());
      samples.push_back(eval["words"].get<double>());
    }
  }
  for (size_t i = 1; i < losses.size(); ++i) {
    CHECK(losses[i] == Approx(losses[0]).epsilon(1e-5));
    CHECK(samples[i] == samples[0]);
  }
}

TEST_CASE_METHOD(RnnText,
                 "a language model is evaluated on two texts: after each epoch and at the end") {
  RnnOptions options = on_text();
  options.test_data = folder.write("test.txt", make_text(12, 3));
  options.epochs = 2;
  const Finished ranks = run_job(Place::kRanks, options);
  const std::vector<Json> lines = ranks.all("eval");
  REQUIRE(lines.size() == 3);
  CHECK(lines[2]["words"] < lines[1]["words"]);
  check_evaluated(ranks, "words", lines[0]["words"], lines[2]["words"]);
  check_perplexity(lines[2]);
  CHECK(run_job(Place::kLocal, options).all("eval") == lines);
}

TEST_CASE_METHOD(RnnText, "the learning rate is divided by four after each stall") {
  const Place place = GENERATE(Place::kRanks, Place::kLocal);
  CAPTURE(place);
  RnnOptions options = on_text();
  options.trainers = 2;
  options.lr = kNothing;
  options.epochs = 5;
  const std::vector<double> expected = {kNothing, kNothing, kNothing / 4, kNothing / 16,
                                        kNothing / 64};
  CHECK(values_of(run_job(place, options).all("eval"), "lr") == expected);

  // The result is the same if the job resumes after the third epoch.
  const Folder saves;
  options.checkpoint = {saves.path(), 0, "auto"};
  options.epochs = 3;
  run_job(place, options);
  options.epochs = 5;
  CHECK(values_of(run_job(place, options).all("eval"), "lr") ==
        std::vector<double>(expected.begin() + 3, expected.end()));
}

TEST_CASE_METHOD(RnnText, "the steps use the learning rate that has been divided") {
  RnnOptions options = on_text();
  options.trainers = 2;
  options.epochs = 8;
  options.lr = 40;  // too large: the loss oscillates
  options.clip = 5;
  const std::vector<Json> ranks = run_job(Place::kRanks, options).all("eval");
  const std::vector<Json> local = run_job(Place::kLocal, options).all("eval");
  CHECK(values_of(ranks, "lr") == values_of(local, "lr"));
  CHECK(ranks.back()["lr"] < 40.0);
  for (size_t i = 0; i < ranks.size(); ++i) {
    CHECK(ranks[i]["loss"].get<double>() == Approx(local[i]["loss"].get<double>()).margin(1e-2));
  }
}

TEST_CASE_METHOD(RnnText, "a sample begins with the prompt and has the requested number of words") {
  const Place place = GENERATE(Place::kRanks, Place::kLocal);
  CAPTURE(place);
  RnnOptions options = on_text();
  options.steps = 10;
  options.trainers = GENERATE(1, 2);
  options.generate = 50;
  options.prompt = GENERATE("w1 w2", "");
  const Finished job = run_job(place, options);
  const std::vector<Json> texts = job.all("text");
  REQUIRE(texts.size() == 1);
  const auto text = texts[0]["text"].get<std::string>();
  CAPTURE(text);
  REQUIRE(text.starts_with(options.prompt));
  std::istringstream rest(text.substr(options.prompt.size()));
  int64_t words = std::count(text.begin(), text.end(), '\n');  // one <eos> per line
  for (std::string word; rest >> word; ++words) CHECK(word[0] == 'w');
  CHECK(words == 50);
  if (options.trainers == 1) {
    CHECK(run_job(Place::kLocal, options).all("text").at(0)["text"] == text);
  }
}

TEST_CASE_METHOD(RnnText, "files that are read while training give the same results") {
  const Place place = GENERATE(Place::kRanks, Place::kLocal);
  RnnOptions options = on_text();
  options.trainers = GENERATE(1, 2);
  options.test_data = folder.write("test.txt", make_text(12, 3));
  options.epochs = 2;
  options.log_interval = 1;
  CAPTURE(place, options.trainers);
  const Finished in_memory = run_job(place, options);
  options.in_memory = "0";
  const Finished streamed = run_job(place, options);
  CHECK(in_memory.all("eval") == streamed.all("eval"));
  CHECK(losses_of(in_memory) == losses_of(streamed));

  // The same tokens as numbers in files, which have the type of --token-type.
  const data::Vocabulary words(scenario::scan_files(options).words);
  options.token_type = GENERATE("uint16", "uint32");
  options.in_memory = options.token_type == "uint16" ? "0" : "256MB";
  for (std::string* path : {&options.data, &options.valid_data, &options.test_data}) {
    const auto tokens = data::load_text(*path, words);
    std::vector<int64_t> numbers(static_cast<size_t>(tokens->size()));
    tokens->read(0, numbers);
    std::string bytes;
    for (const int64_t number : numbers) {
      bytes += static_cast<char>(number);
      bytes += std::string(options.token_type == "uint16" ? 1 : 3, '\0');
    }
    *path = folder.write(std::filesystem::path(*path).stem().string() + ".bin", bytes);
  }
  options.generate = 5;
  options.prompt = "12 1";
  const Finished numbers = run_job(place, options);
  CHECK(in_memory.all("eval") == numbers.all("eval"));
  CHECK(losses_of(in_memory) == losses_of(numbers));
  const auto text = numbers.all("text").at(0)["text"].get<std::string>();
  CAPTURE(text);
  CHECK(text.starts_with("12 1 "));
  CHECK(text.find_first_not_of("0123456789 ") == std::string::npos);
  CHECK(std::count(text.begin(), text.end(), ' ') == 6);
}

TEST_CASE_METHOD(RnnText, "without text or a number of words there is no sample") {
  RnnOptions options = GENERATE(false, true) ? on_text() : on_random();
  options.steps = 2;
  options.generate = options.data.empty() ? 10 : 0;
  CHECK(run_job(Place::kRanks, options).all("text").empty());
}
