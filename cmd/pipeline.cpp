#include "pipeline.h"

#include <unistd.h>

#include "distrain/app/checks.h"
#include "distrain/app/option_blocks.h"
#include "distrain/scenario/pipeline.h"

namespace distrain::cmd {

using namespace app;
using job::sometimes;
using enum job::FieldType;

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
  command.details =
      "Activations never go through the master, which reads the data, cuts the batches and takes "
      "the\n"
      "loss; all micro-batches of a batch make one update. `master`, `worker1`, `worker2`, ... are "
      "the\n"
      "ranks' roles.\n"
      "\n"
      "Batch norm takes the mean and deviation of each micro-batch by itself, as all pipelines do: "
      "so\n"
      "another --num-split gives somewhat other losses, and --local with the same gives the same "
      "ones. A\n"
      "job that is resumed ends in the same bits with the same --threads.";
  command.examples = {
      {"distrain pipeline --num-split 1,2,4,8 | jq -r 'select(.event == \"split\") | .batch_s'",
       "Which number of micro-batches is best here"},
      {"distrain pipeline --explain --stages 4 --schedule 1f1b --num-split 8",
       "What a schedule looks like"},
      {"distrain pipeline --stages 3 --inject stage=100ms",
       "Whether the stages wait no longer than the schedule says"},
      {"distrain pipeline --data cifar-10-batches-bin --loss ce --num-split 8 --batches 400",
       "Real images"},
      {"for r in 0 1 2; do distrain pipeline --rank $r & done; wait",
       "Three ranks that are started one by one"},
  };
  command.table = option_table();
  describe(
      command.table,
      {{"split",
        "A block (layer3.2), a layer (layer2: its last block) or the stem (the first convolution "
        "with\n"
        "its pooling, also conv1). One name less than there are stages."},
       {"data",
        "Pixels go from 0 to 1 and are normalised by CIFAR-10's mean and deviation of each "
        "channel, or\n"
        "grey ones by 0.5 and 0.5 and repeated to three channels; then images are resized."},
       {"weights",
        "All parameters and buffers, by torchvision's names. A checkpoint that --resume loads "
        "counts\n"
        "instead."},
       {"num-split",
        "Each ends in a `split` line. A batch that does not divide evenly has micro-batches that "
        "differ\n"
        "by one image."},
       {"schedule",
        "With gpipe a stage holds the activations of all micro-batches, with 1f1b stage s of p "
        "those of\n"
        "p - s + 1 at most; it takes as long."},
       {"checkpoint",
        "Needs one number in --num-split. The file serves as --weights, too. Stages, split and "
        "schedule\n"
        "may be others when the job goes on."},
       {"rpc-timeout", "What waits for a stage to compute has none."},
       {"explain",
        "A line for each number of --num-split. Each step counts as one unit of time; `length` "
        "and\n"
        "`begin` are in such units, `bubble` is the share of the stages' time that is waiting."}});
  const auto with_data = [](const char* of) {
    return sometimes(
        {"accuracy", kNumber, std::string("share of right classes ") + of + "; with --data"});
  };
  const job::Field samples_per_s = {"samples_per_s", kNumber, "images a second"};
  command.events = {
      job::step_event({{"num_split", kInteger, "micro-batches of a batch"},
                       {"batch_s", kNumber, "seconds from the cutting of the batch to its update"},
                       samples_per_s,
                       with_data("in the batch")}),
      {"split",
       "at the end of the run of a number of --num-split",
       {{"num_split", kInteger, "micro-batches of a batch"},
        {"schedule", kText, "--schedule"},
        {"batches", kInteger, "of this run"},
        {"batch_size", kInteger, "images a batch"},
        {"wall_s", kNumber, "seconds that the run took"},
        {"batch_s", kNumber, "seconds of a batch: the median without the first"},
        {"stage_s", kNumbers, "seconds that each stage itself computed a batch; null on a GPU"},
        {"activations", kIntegers,
         "micro-batches that each stage held at most between forward and backward pass, without "
         "those "
         "that it fetched ahead"},
        samples_per_s,
        {"loss", kNumber, "of the last batch"},
        with_data("in the last batch")}},
      {"end",
       "",
       {sometimes({"loss", kNumber, "of the last batch"}), with_data("in the last batch"),
        sometimes({"num_split", kInteger, "of the last run"}),
        sometimes({"batch_s", kNumber, "of the last run"}), sometimes(samples_per_s),
        sometimes({"best",
                   kObject,
                   "the quickest run",
                   {{"num_split", kInteger, "its micro-batches"},
                    {"batch_s", kNumber, "its seconds a batch"}}})}}};
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
