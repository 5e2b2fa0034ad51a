#include "pipeline.h"

#include <unistd.h>

#include "distrain/app/checks.h"
#include "distrain/app/option_blocks.h"
#include "distrain/scenario/pipeline.h"

namespace distrain::cmd {

using namespace app;

namespace {

constexpr double kMaxStages = 18;  // blocks of resnet50

OptionTable option_table() {
  OptionTable table;
  append(table, "Model and data", Scope::kJob,
         {choice("model", {"resnet50", "resnet18"}, "torchvision's, with its names"),
          integer("stages", "2", 1, kMaxStages, "stages of the model; the job has one rank more"),
          by_default(text("split", "BLOCK[,...]",
                          "the last block of each stage but the last (layer2, layer3.2)"),
                     "layer2 with 2 stages, else by estimated cost"),
          integer("image-size", "128", 1, 8192, "pixels of an image's side"),
          integer("classes", "1000", 1, 1048576, "scores of an image")});
  append(
      table, "Model and data", Scope::kInput,
      {by_default(text("data", "DIR", "folder with CIFAR-10's binary files or MNIST's IDX files"),
                  "random images"),
       by_default(text("weights", "FILE", "safetensors file with the weights to begin with"),
                  "torchvision's initialisation")});
  append(table, "Training", Scope::kJob,
         {integers("num-split", "1,2,4,8", 1, kMaxInt,
                   "micro-batches of a batch; each number is a run of its own with a fresh model"),
          choice("schedule", {"gpipe", "1f1b", "naive"},
                 "gpipe: all forward passes first; 1f1b: as few activations as can be; "
                 "naive: one micro-batch at a time"),
          integer("batches", "3", 1, kMaxInt, "of each run"),
          integer("batch-size", "120", 1, kMaxInt, "images a batch"),
          choice("loss", {"mse", "ce"}, "mse: against one-hot; ce: cross entropy"),
          real("lr", "0.05", 0, 1e6, "learning rate of SGD"), seed_option(),
          integer("log-interval", "0", 0, kMaxInt, "batches between 'step' lines; 0: none")});
  append_checkpoints(table, "batches", "at the end");
  append(
      table, "Run", Scope::kRank,
      {flag("explain", "the schedule's table as JSON, on a terminal as a timeline; no training")});
  append_common(table);
  change(table, "inject", [](Option& o) {
    o.help +=
        ", stage=100ms (sleep in place of computing: so long for a batch's forward pass, and as "
        "long for its backward)";
  });
  return table;
}

scenario::PipelineOptions pipeline_options(const ParsedOptions& parsed) {
  auto options = common_options<scenario::PipelineOptions>(parsed);
  options.stages = parsed.whole("stages");
  options.model = parsed.text("model");
  if (!parsed.text("split").empty()) options.split = split_list(parsed.text("split"));
  options.num_split = parsed.integers("num-split");
  options.schedule = parsed.text("schedule");
  options.loss = parsed.text("loss");
  options.batches = parsed.integer("batches");
  options.batch_size = parsed.integer("batch-size");
  options.image_size = parsed.integer("image-size");
  options.classes = parsed.integer("classes");
  options.lr = parsed.real("lr");
  options.data = parsed.text("data");
  options.weights = parsed.text("weights");
  return options;
}

void check(const ParsedOptions& options, Placement& placement) {
  if (!placement.has_rank_0()) return;  // rank 0 sees to it
  scenario::check_pipeline(pipeline_options(options));
  check_folder(options, "data");
  check_file(options, "weights");
}

/// A line of JSON, or a timeline, for each number of micro-batches.
std::optional<std::string> explanation(const ParsedOptions& parsed) {
  if (!parsed.flag("explain")) return std::nullopt;
  const scenario::PipelineOptions options = pipeline_options(parsed);
  scenario::check_pipeline(options);
  std::string text;
  for (const int64_t num_split : options.num_split) {
    text += isatty(STDOUT_FILENO) ? scenario::explain_pipeline_in_words(options, num_split)
                                  : scenario::explain_pipeline(options, num_split).dump() + '\n';
  }
  return text;
}

}  // namespace

JobCommand pipeline_command() {
  JobCommand command;
  command.line = {"pipeline", "a ResNet cut into stages, micro-batches flowing through them"};
  command.description =
      "Trains a ResNet whose layers are spread over several ranks. Each batch is cut into\n"
      "micro-batches, so that the stages work at the same time; activations go from stage to\n"
      "stage, gradients back. Rank 0 is the master, ranks 1 to S are the stages.";
  command.examples = {
      "distrain pipeline --num-split 1,2,4,8",
      "distrain pipeline --stages 3 --schedule 1f1b --num-split 8 --log-interval 1",
      "distrain pipeline --explain --stages 4 --schedule 1f1b --num-split 8",
      "for r in 0 1 2; do distrain pipeline --rank $r & done; wait",
  };
  command.table = option_table();
  using Use = job::DeviceRole::Use;
  command.devices.roles = {{"worker", "stage", Use::kCompute}, {"master", "", Use::kIfNamed}};
  command.size = {"stages", 1};
  command.check = check;
  command.answer = explanation;
  command.has_stages = true;
  command.role = [](const ParsedOptions&, int rank) { return scenario::pipeline_role(rank); };
  command.run = run_of<scenario::PipelineOptions>(
      {pipeline_options, scenario::run_pipeline, scenario::run_pipeline_local});
  return command;
}

}  // namespace distrain::cmd
