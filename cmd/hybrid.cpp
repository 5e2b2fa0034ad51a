#include "hybrid.h"

#include "distrain/app/checks.h"
#include "distrain/app/option_blocks.h"
#include "distrain/scenario/hybrid.h"

namespace distrain::cmd {

using namespace app;
using job::sometimes;
using enum job::FieldType;

namespace {

scenario::HybridOptions hybrid_options(const ParsedOptions& parsed) {
  auto options = trainer_options<scenario::HybridOptions>(parsed);
  options.batches = parsed.whole("batches");
  options.num_embeddings = parsed.whole("num-embeddings");
  options.embedding_dim = parsed.whole("embedding-dim");
  options.classes = parsed.whole("classes");
  options.optimizer = parsed.text("optimizer");
  options.test_data = parsed.text("test-data");
  return options;
}

OptionTable option_table() {
  OptionTable table;
  append(table, "Model and data", Scope::kJob,
         {integer("trainers", "2", 1, 1022, "trainers; the job has two ranks more"),
          random_only(integer("num-embeddings", "100", 1, kMaxInt,
                              "rows of the embedding table (with --data: its words)")),
          integer("embedding-dim", "16", 1, 1048576, "numbers in a row"),
          random_only(integer("classes", "8", 1, 1048576, "classes (with --data: its labels)"))});
  append(table, "Model and data", Scope::kInput,
         {by_default(
              text("data", "FILE", "train on text: '__label__X word word ...', one example a line"),
              "random batches"),
          text("test-data", "FILE", "evaluate on this file after training")});
  append(table, "Training", Scope::kJob,
         {epochs_option("100"), steps_option(), random_batches_option("10"),
          data_only(
              integer("batch-size", "32", 1, kMaxInt, "examples a batch and trainer, with --data")),
          real("lr", "0.05", 0, 1e6, "learning rate"),
          choice("optimizer", {"sgd", "adagrad", "adam"}, "of all parameters, remote and local"),
          mode_option(), seed_option(), log_interval_option("0")});
  append_checkpoints(table);
  append_common(table);
  return table;
}

}  // namespace

JobCommand hybrid_command() {
  JobCommand command;
  command.line = {"hybrid", "embeddings on a parameter server, dense layers under DDP on trainers"};
  command.description =
      "Trains a text classifier: an EmbeddingBag held by a parameter server, which the trainers\n"
      "look up over RPC, and a Linear layer that they share by DistributedDataParallel. Ranks\n"
      "0 to T-1 are the trainers, T is the master, T+1 the parameter server.";
  command.details =
      "The table is on the parameter server; a trainer sends the gradient of what it looked up "
      "back.\n"
      "`trainer0`, `trainer1`, ..., `master` and `ps` are the ranks' roles. Only the trainers read "
      "the\n"
      "data, and each may be given a path of its own.";
  command.examples = {
      {"distrain hybrid", "The tutorial's job"},
      {"distrain hybrid --epochs 20 --mode sync", "The trainers in step with each other"},
      {"distrain hybrid --data r8.train --test-data r8.test --optimizer adagrad --epochs 15",
       "Text"},
      {"for r in 0 1 2 3; do distrain hybrid --rank $r & done; wait",
       "Four ranks that are started one by one"},
      {"distrain hybrid --ranks 0-1 --master-addr node0",
       "The first two ranks, on the machine node0; --ranks 2-3 on another one starts the others"},
  };
  command.table = option_table();
  describe(command.table,
           {{"data", "An example has its labels and words between blanks, as fastText has them."}});
  command.events = {
      job::step_event({{"samples_per_s", kNumber, "examples of this trainer a second"}}),
      job::epoch_event(),
      job::eval_event("at the end, with --test-data",
                      {{"accuracy", kNumber, "share of the examples whose label is right"}}),
      {"end",
       "",
       {sometimes({"loss", kNumber, "mean over the last epoch, and over the trainers"}),
        sometimes({"accuracy", kNumber, "of the evaluation"}),
        sometimes({"updates", kInteger, "of the table"}),
        sometimes({"ddp", kText, "how trainers on GPUs average: staged or nccl"})}}};
  using Use = job::DeviceRole::Use;
  command.devices.roles = {
      {"trainer", "", Use::kCompute}, {"ps", "server", Use::kCompute}, {"master", "", Use::kNone}};
  command.size = {"trainers", 2};
  command.check = [](const ParsedOptions& options, Placement& placement) {
    check_data_files(options, placement, "test-data");
  };
  command.role = [](const ParsedOptions& parsed, int rank) {
    return scenario::hybrid_role(hybrid_options(parsed), rank);
  };
  command.run = run_of<scenario::HybridOptions>(
      {hybrid_options, scenario::run_hybrid, scenario::run_hybrid_local});
  return command;
}

}  // namespace distrain::cmd
