#include "hybrid.h"

#include <errno.h>
#include <fmt/format.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "distrain/base/error.h"
#include "distrain/scenario/hybrid.h"
#include "option_table.h"

namespace distrain::cmd {
namespace {

scenario::HybridOptions hybrid_options(const ParsedOptions& parsed) {
  const auto whole = [&parsed](const char* name) { return static_cast<int>(parsed.integer(name)); };
  scenario::HybridOptions options;
  options.trainers = whole("trainers");
  options.epochs = whole("epochs");
  options.batches = whole("batches");
  options.num_embeddings = whole("num-embeddings");
  options.embedding_dim = whole("embedding-dim");
  options.classes = whole("classes");
  options.lr = parsed.real("lr");
  options.optimizer = parsed.text("optimizer");
  options.mode = parsed.text("mode");
  options.data = parsed.text("data");
  options.test_data = parsed.text("test-data");
  options.batch_size = whole("batch-size");
  options.seed = static_cast<uint64_t>(parsed.integer("seed"));
  options.threads = whole("threads");
  options.log_interval = whole("log-interval");
  return options;
}

void check_file(const ParsedOptions& options, const char* name) {
  const std::string path = options.text(name);
  if (path.empty()) return;
  const auto fail = [&](const char* why) {
    throw base::Exception(base::ErrorKind::kBadData, fmt::format("--{} {}: {}", name, path, why));
  };
  struct stat info {};
  if (stat(path.c_str(), &info) != 0 || access(path.c_str(), R_OK) != 0) fail(strerror(errno));
  if (S_ISDIR(info.st_mode)) fail("is a directory");
  if (S_ISREG(info.st_mode) && info.st_size == 0) fail("the file is empty");
}

/// A rank that joins does without: the data may be rank 0's to name, and only trainers read it.
void check(const ParsedOptions& options, Placement& placement) {
  const bool has_rank_0 = placement.mode != Placement::Mode::kJoin &&
                          (placement.ranks.empty() || placement.ranks.front() == 0);
  if (!has_rank_0) return;
  const bool data = options.given("data");
  if (options.given("test-data") && !data) {
    throw base::Exception(base::ErrorKind::kInvalid, "--test-data needs --data");
  }
  for (const Option& option : options.table()) {
    if (!options.given(option.name) || !(data ? option.random_only : option.data_only)) continue;
    placement.warn(
        fmt::format("--{} has no effect {} --data", option.name, data ? "with" : "without"));
  }
  check_file(options, "data");
  check_file(options, "test-data");
}

scenario::Outcome run(const ParsedOptions& parsed, const scenario::Job& job, bool local,
                      int threads, scenario::EventSink& sink) {
  scenario::HybridOptions own = hybrid_options(parsed);
  own.threads = threads;
  if (local) return scenario::run_hybrid_local(own, job, sink);
  const auto adopt = [&parsed, threads](const scenario::OptionMap& of_rank_0) {
    scenario::HybridOptions adopted = hybrid_options(adopt_options(parsed, of_rank_0));
    adopted.threads = threads;
    return adopted;
  };
  return scenario::run_hybrid(own, job, adopt, sink);
}

}  // namespace

JobCommand hybrid_command() {
  JobCommand command;
  command.line = {"hybrid", "embeddings on a parameter server, dense layers under DDP on trainers"};
  command.description =
      "Trains a text classifier: an EmbeddingBag held by a parameter server, which the trainers\n"
      "look up over RPC, and a Linear layer that they share by DistributedDataParallel. Ranks\n"
      "0 to T-1 are the trainers, T is the master, T+1 the parameter server.\n";
  command.description.pop_back();
  command.examples = {
      "distrain hybrid --epochs 20 --mode sync",
      "distrain hybrid --data r8.train --test-data r8.test --optimizer adagrad --epochs 15",
      "for r in 0 1 2 3; do distrain hybrid --rank $r & done; wait",
  };
  command.table = hybrid_option_table();
  command.size = {"trainers", 2};
  command.check = check;
  command.role = [](const ParsedOptions& parsed, int rank) {
    return scenario::hybrid_role(hybrid_options(parsed), rank);
  };
  command.run = run;
  return command;
}

}  // namespace distrain::cmd
