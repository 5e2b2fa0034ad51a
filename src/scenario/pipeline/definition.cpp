// distrain pipeline: its options and ranks, and what can be said of it before it runs.

#include <algorithm>
#include <span>

#include <unistd.h>

#include "distrain/base/error.h"
#include "distrain/job/training.h"
#include "distrain/models/resnet.h"
#include "distrain/scenario/pipeline.h"
#include "run.h"
#include "stage.h"

namespace distrain::scenario {

namespace {

using base::invalid;

constexpr double kMaxStages = 18;  // blocks of resnet50

std::vector<models::BlockRange> cut(const PipelineOptions& options) {
  return models::cut_resnet(options.model, options.stages, options.split, options.classes,
                            options.image_size);
}

/// The table and its timeline, for scripts.
job::Json explain(const PipelineOptions& options, const nn::PipelineSchedule& schedule) {
  const nn::PipelineTimeline timeline = nn::simulate(schedule);
  const std::vector<std::string> blocks = models::resnet_blocks(options.model);
  const std::vector<models::BlockRange> ranges = cut(options);
  job::Json rows = job::Json::array();
  for (size_t stage = 0; stage < ranges.size(); ++stage) {
    job::Json steps = job::Json::array();
    for (const nn::PipelineStep& step : schedule.stages[stage]) {
      const bool forward = step.kind == nn::PipelineStep::Kind::kForward;
      steps.push_back({{"op", forward ? "forward" : "backward"},
                       {"micro_batch", step.micro_batch},
                       {"begin", timeline.begin[stage][steps.size()]}});
    }
    const auto own =
        std::span(blocks).subspan(ranges[stage].first, ranges[stage].last - ranges[stage].first);
    rows.push_back({{"stage", stage + 1},
                    {"activations", timeline.activations[stage]},
                    {"steps", std::move(steps)},
                    {"blocks", std::vector(own.begin(), own.end())}});
  }
  return {{"schedule", schedule.name},           {"stages", schedule.stages.size()},
          {"num_split", schedule.micro_batches}, {"length", timeline.length},
          {"bubble", timeline.bubble},           {"table", std::move(rows)}};
}

/// Throws `invalid` for options that do not go together: more micro-batches than samples, a split
/// that does not fit the model or the stages, a schedule that could not run.
void check_pipeline(const PipelineOptions& options) {
  cut(options);
  const bool saves = !options.checkpoint.dir.empty() || !options.checkpoint.resume.empty();
  const bool evaluates = !options.valid_data.empty() || !options.test_data.empty();
  if ((saves || evaluates) && options.num_split.size() > 1) {
    invalid(std::string(saves                         ? "--checkpoint and --resume need"
                        : !options.valid_data.empty() ? "--valid-data needs"
                                                      : "--test-data needs") +
            " one --micro-batches, not several: each number trains a model of its own");
  }
  for (const int64_t num_split : options.num_split) {
    if (num_split > options.batch_size) {
      invalid("--micro-batches " + std::to_string(num_split) + ": there are only " +
              std::to_string(options.batch_size) + " samples in a batch (--batch-size)");
    }
    models::check_resnet_input(options.image_size, options.batch_size / num_split);
    nn::simulate(nn::make_schedule(options.schedule, options.stages, num_split));
  }
  job::Plan::of_steps(options, options.batches);
}

}  // namespace

std::string explain_pipeline(const PipelineOptions& options, bool for_people) {
  check_pipeline(options);
  std::string text;
  for (const int64_t num_split : options.num_split) {
    const auto schedule = nn::make_schedule(options.schedule, options.stages, num_split);
    text += for_people ? nn::to_text(schedule) : explain(options, schedule).dump() + '\n';
  }
  return text;
}

PipelineOptions::PipelineOptions() { lr = 0.05; }

void PipelineOptions::describe(job::OptionList<PipelineOptions>& list) {
  list.choice("model", &PipelineOptions::model, {"resnet50", "resnet18"},
              "torchvision's, with its names");
  list.integer("stages", &PipelineOptions::stages, "stages of the model; the job has one rank more")
      .range(1, kMaxStages)
      .may_change();
  list.text("split", &PipelineOptions::split, "BLOCK[,...]",
            "the last block of each stage but the last (layer2, layer3.2)")
      .by_default("layer2 with 2 stages, else by estimated cost")
      .may_change()
      .details(R"(
A block (layer3.2), a layer (layer2: its last block) or the stem (the first convolution with
its pooling, also conv1). One name less than there are stages.)");
  list.integer("image-size", &PipelineOptions::image_size, "pixels of an image's side")
      .range(1, 8192);
  list.integer("classes", &PipelineOptions::classes, "scores of an image").range(1, 1048576);
  list.folder("data", &PipelineOptions::data,
              "folder with CIFAR-10's binary files or MNIST's IDX files")
      .by_default("random images")
      .details(R"(
Pixels go from 0 to 1 and are normalised by CIFAR-10's mean and deviation of each channel, or
grey ones by 0.5 and 0.5 and repeated to three channels; then images are resized.)");
  list.folder("valid-data", &PipelineOptions::valid_data,
              "evaluate on this folder's test images at the end of each epoch")
      .needs("data")
      .details("Needs --data and one --micro-batches. It may be the same folder.");
  list.folder("test-data", &PipelineOptions::test_data,
              "evaluate on this folder's test images at the end")
      .needs("data")
      .details("As --valid-data.");
  list.file("weights", &PipelineOptions::weights, "safetensors file with the weights to begin with")
      .by_default("torchvision's initialisation")
      .details(R"(
All parameters and buffers, by torchvision's names. A checkpoint that --resume loads counts
instead.)");
  list.group("Training");
  list.integers("micro-batches", &PipelineOptions::num_split,
                "micro-batches of a batch; each number is a run of its own with a fresh model")
      .range(1, job::kMaxInt)
      .formerly("num-split")
      .details(R"(
Each ends in a `split` line. A batch that does not divide evenly has micro-batches that differ
by one image.)");
  list.choice("schedule", &PipelineOptions::schedule, {"gpipe", "1f1b", "naive"},
              "gpipe: all forward passes first; 1f1b: as few activations as can be; "
              "naive: one micro-batch at a time")
      .may_change()
      .details(R"(
With gpipe a stage holds the activations of all micro-batches, with 1f1b stage s of p those of
p - s + 1 at most; it takes as long.)");
  list.integer("batches", &PipelineOptions::batches, "of each run")
      .range(1, job::kMaxInt)
      .may_change();
  list.integer("epochs", &PipelineOptions::epochs, "passes over the images, in place of --batches")
      .range(0, job::kMaxInt)
      .by_default("--batches")
      .needs("data")
      .may_change()
      .details("An epoch counts as many batches as its images fill.");
  list.integer("batch-size", &PipelineOptions::batch_size, "images a batch").range(1, job::kMaxInt);
  list.choice("loss", &PipelineOptions::loss, {"mse", "ce"},
              "mse: against one-hot; ce: cross entropy");
  list.group("Run");
  list.flag("explain", &PipelineOptions::explain,
            "the schedule's table as JSON, on a terminal as a timeline; no training")
      .of_this_rank()
      .details(R"(
A line for each number of --micro-batches. Each step counts as one unit of time; `length` and
`begin` are in such units, `bubble` is the share of the stages' time that is waiting.)");
  list.find("lr-schedule").help = lr_schedule_help("batches of a run");
  list.find("log-interval").help = "batches between 'step' lines; 0: none; auto: by time";
  list.row("checkpoint-every")
      .help("batches between two saves")
      .by_default("at the end")
      .details("With --data at the end of each epoch.");
  list.row("checkpoint")
      .details(
          "Needs one number in --micro-batches. The file serves as --weights, too. Stages, split "
          "and schedule\nmay be others when the job goes on.");
}

const job::Definition<PipelineOptions>& pipeline_job() {
  using Use = cuda::DeviceRole::Use;
  using enum job::FieldType;
  using job::sometimes;
  const auto with_data = [](const char* of) {
    return sometimes(
        {"accuracy", kNumber, std::string("share of right classes ") + of + "; with --data"});
  };
  const job::Field samples_per_s = {"samples_per_s", kNumber, "images a second"};
  static const auto kJob =
      job::define<PipelineOptions>("pipeline",
                                   "a ResNet cut into stages, micro-batches flowing through them")
          .describe(
              R"(Trains a ResNet whose layers are spread over several ranks. Each batch is cut into
micro-batches, so that the stages work at the same time; activations go from stage to
stage, gradients back. Rank 0 is the master, ranks 1 to S are the stages.)")
          .details(R"(
Activations never go through the master, which reads the data, cuts the batches and takes the
loss; all micro-batches of a batch make one update. `master`, `worker1`, `worker2`, ... are the
ranks' roles.

Batch norm takes the mean and deviation of each micro-batch by itself, as all pipelines do: so
another --micro-batches gives somewhat other losses, and --local with the same gives the same ones. A
job that is resumed ends in the same bits with the same --threads.

`distrain predict CHECKPOINT [FILE]` gives the classes of images: of a file of those that --data takes
(test_batch.bin, t10k-images-idx3-ubyte), or of a folder with it.)")
          .example(
              "distrain pipeline --micro-batches 1,2,4,8 | jq -r 'select(.event == \"split\") | "
              ".batch_s'",
              "Which number of micro-batches is best here")
          .example("distrain pipeline --explain --stages 4 --schedule 1f1b --micro-batches 8",
                   "What a schedule looks like")
          .example("distrain pipeline --stages 3 --inject stage=100ms",
                   "Whether the stages wait no longer than the schedule says")
          .example(
              "distrain pipeline --data cifar --valid-data cifar --loss ce --micro-batches 8 "
              "--epochs 5",
              "Real images, and how well it does on others")
          .example("for r in 0 1 2; do distrain pipeline --rank $r & done; wait",
                   "Three ranks that are started one by one")
          .events(
              {job::step_event(
                   {{"num_split", kInteger, "micro-batches of a batch"},
                    {"batch_s", kNumber, "seconds from the cutting of the batch to its update"},
                    samples_per_s,
                    with_data("in the batch")}),
               job::eval_event(
                   "at the end of an epoch, or of the job, with --valid-data or --test-data"),
               {"split",
                "at the end of the run of a number of --micro-batches",
                {{"num_split", kInteger, "micro-batches of a batch"},
                 {"schedule", kText, "--schedule"},
                 {"batches", kInteger, "of this run"},
                 {"batch_size", kInteger, "images a batch"},
                 {"wall_s", kNumber, "seconds that the run took"},
                 {"batch_s", kNumber, "seconds of a batch: the median without the first"},
                 {"stage_s", kNumbers,
                  "seconds that each stage itself computed a batch; null on a GPU"},
                 {"activations", kIntegers,
                  "micro-batches that each stage held at most between forward and backward pass, "
                  "without those that it fetched ahead"},
                 samples_per_s,
                 {"loss", kNumber, "of the last batch"},
                 with_data("in the last batch")}},
               {"end",
                "",
                {sometimes({"loss", kNumber, "of the last batch"}),
                 sometimes({"num_split", kInteger, "of the last run"}),
                 sometimes({"batch_s", kNumber, "of the last run"}), sometimes(samples_per_s),
                 with_data("of the last evaluation, or in the last batch"),
                 sometimes({"eval", kObject, "the last evaluation", job::eval_event("").fields}),
                 sometimes({"best",
                            kObject,
                            "the quickest run",
                            {{"num_split", kInteger, "its micro-batches"},
                             {"batch_s", kNumber, "its seconds a batch"}}})}}})
          .role("master", 1, train_pipeline, Use::kIfNamed)
          .role("worker", &PipelineOptions::stages, {}, Use::kCompute, "stage")
          .expose(PipelineStage::expose)
          .prepare([](job::Rank& rank, const PipelineOptions& options) {
            if (rank.role() != "master") return;
            rank.agent().provide(std::make_shared<PipelineData>(options));
          })
          .local(train_pipeline_local)
          .predict(predict_pipeline)
          .check([](const PipelineOptions& options, const job::Preflight& preflight) {
            if (preflight.given("batches") && options.epochs > 0) {
              invalid("--epochs and --batches both say how long to train: give one of them");
            }
            if (preflight.has_rank_0) check_pipeline(options);  // it sees to it
          })
          .answer([](const PipelineOptions& options) -> std::optional<std::string> {
            if (!options.explain) return std::nullopt;
            return explain_pipeline(options, isatty(STDOUT_FILENO) != 0);
          })
          .has_stages()
          .change([](job::OptionTable& table) {
            std::ranges::find(table, "rpc-timeout", &job::Option::name)->details =
                "What waits for a stage to compute has none.";
            std::ranges::find(table, "inject", &job::Option::name)->help +=
                ", stage=100ms (sleep in place of computing: so long for a batch's forward pass, "
                "and as long for its backward)";
          });
  return kJob;
}

}  // namespace distrain::scenario
