// distrain pipeline: its options, roles and help.

#include <algorithm>

#include <unistd.h>

#include "distrain/base/error.h"
#include "distrain/job/training.h"
#include "jobs.h"
#include "scenario/pipeline/run.h"
#include "scenario/pipeline/stage.h"

namespace distrain {

using namespace scenario;

void PipelineOptions::describe(job::OptionList<PipelineOptions>& list) {
  using Self = PipelineOptions;
  list.choice("model", &Self::model, {"resnet50", "resnet18"}, "train this torchvision model");
  list.integer("stages", &Self::stages, "cut the model into N stages on N + 1 ranks")
      .range(1, 18)  // resnet50 has 18 blocks
      .may_change();
  list.text("split", &Self::split, "BLOCK[,...]",
            "end each stage except the last one with a BLOCK, such as layer2 or layer3.2")
      .by_default("layer2 for 2 stages, otherwise by estimated cost")
      .may_change()
      .details(R"(
A BLOCK is a block (layer3.2), a layer (layer2, which means its last block) or the stem (the first
convolution with its pooling, also called conv1). S stages need S - 1 names.)");
  list.integer("image-size", &Self::image_size, "resize images to N x N pixels").range(1, 8192);
  list.integer("classes", &Self::classes, "predict one of N classes").range(1, 1048576);
  list.folder("data", &Self::data, "train on CIFAR-10's binary files or MNIST's IDX files in DIR")
      .by_default("random images with random labels")
      .details(R"(
Pixels range from 0 to 1 and are normalised: colour images with CIFAR-10's mean and deviation of each
channel, grey images with 0.5 and 0.5, repeated in three channels. Then the images are resized.)");
  list.folder("valid-data", &Self::valid_data,
              "evaluate on the test images in DIR at the end of each epoch")
      .needs("data")
      .details("Needs --data and a single number in --micro-batches. DIR may be that of --data.");
  list.folder("test-data", &Self::test_data, "evaluate on the test images in DIR at the end")
      .needs("data")
      .details("See --valid-data.");
  list.file("weights", &Self::weights, "start from the weights in a safetensors file")
      .by_default("torchvision's initialisation")
      .details(R"(
The file has all parameters and buffers under torchvision's names. If --resume loads a checkpoint,
the job uses that instead.)");
  list.group("Training");
  list.integers("micro-batches", &Self::num_split,
                "cut each batch into N micro-batches; each N is a separate run with a new model")
      .range(1, job::kMaxInt)
      .formerly("num-split")
      .details(R"(
Each run prints a `split` line. If a batch does not divide evenly, its micro-batches differ in size
by one image. N is a number of micro-batches, not the size of one as in the PyTorch tutorial.)");
  list.choice("schedule", &Self::schedule, {"gpipe", "1f1b", "naive"},
              "gpipe: run all forward passes first; 1f1b: hold the fewest activations; "
              "naive: run one micro-batch at a time")
      .may_change()
      .details(R"(
With gpipe each stage holds the activations of all micro-batches. With 1f1b, stage s of p stages holds
the activations of at most p - s + 1 micro-batches. Both take the same time.)");
  list.integer("batches", &Self::batches, "train for N batches in each run")
      .range(1, job::kMaxInt)
      .may_change();
  list.integer("epochs", &Self::epochs, "train for N epochs; 0 trains for --batches")
      .range(0, job::kMaxInt)
      .needs("data")
      .may_change()
      .details("An epoch has as many batches as its images fill.");
  list.integer("batch-size", &Self::batch_size, "use N images per batch").range(1, job::kMaxInt);
  list.choice("loss", &Self::loss, {"mse", "ce"},
              "mse: compare scores with one-hot labels; ce: compute the cross entropy");
  list.group("Run");
  list.flag("explain", &Self::explain,
            "print the schedule as JSON, or as a timeline on a terminal; train nothing")
      .of_this_rank()
      .details(R"(
There is a line for each number in --micro-batches. A pass of a micro-batch through a stage takes one unit
of time; `length` and `begin` are in these units, and `bubble` is the share of time that stages wait.)");
  list.find("lr-schedule").help = lr_schedule_help("batches of a run");
  list.find("log-interval").help =
      "print a line every N batches; 0 prints none; auto prints one every 5 s";
  list.row("checkpoint-every")
      .help("save every N batches; 0 saves at the end of each epoch")
      .details("Random images have no epochs, so 0 saves only at the end.");
  list.row("checkpoint")
      .details(
          "Needs a single number in --micro-batches. --weights can read model.safetensors of a "
          "checkpoint.\n--stages, --split and --schedule may change when the job resumes.");
}

const job::Definition<PipelineOptions>& cmd::pipeline_job() {
  const auto with_data = [](const char* of) {
    return sometimes(
        {"accuracy", kNumber, std::string("share of correct classes ") + of + ", with --data"});
  };
  const job::Field samples_per_s = {"samples_per_s", kNumber, "images per second"};
  const job::Field num_split = {"num_split", kInteger, "micro-batches per batch"};
  const job::Field batch_s = {"batch_s", kNumber, "median seconds per batch"};
  const job::Field best = {"best", kObject, "the fastest run", {num_split, batch_s}};
  static const auto kJob =
      job::define<PipelineOptions>("pipeline",
                                   "train a ResNet in stages through which micro-batches flow")
          .describe(
              R"(Trains a ResNet whose layers are spread over several ranks, the stages. Each
batch is cut into micro-batches so that the stages work at the same time.
Activations flow from stage to stage, and gradients flow back. Rank 0 is the
master, and ranks 1 to S are the stages.)")
          .details(R"(
The master reads the data, cuts the batches and computes the loss; activations between stages do not
pass through it. All micro-batches of a batch make one update. The ranks' roles are `master`,
`worker1`, `worker2`, ....

Batch norm uses the mean and deviation of each micro-batch, as in other pipelines. The losses
therefore depend on --micro-batches; --local with the same number gives the same losses. With the same
--threads a resumed job ends with bit-identical parameters.

`distrain predict CHECKPOINT [FILE]` prints the classes of images. FILE is a data file such as
test_batch.bin or t10k-images-idx3-ubyte, or a folder with such a file.)")
          .example(
              "distrain pipeline --micro-batches 1,2,4,8 | jq -r 'select(.event == \"split\") | "
              ".batch_s'",
              "Find the best number of micro-batches")
          .example("distrain pipeline --explain --stages 4 --schedule 1f1b --micro-batches 8",
                   "Show a schedule")
          .example("distrain pipeline --stages 3 --inject stage=100ms",
                   "Check that the stages wait no longer than the schedule says")
          .example(
              "distrain pipeline --data cifar --valid-data cifar --loss ce --micro-batches 8 "
              "--epochs 5",
              "Train on real images and evaluate after each epoch")
          .example("for r in 0 1 2; do distrain pipeline --rank $r & done; wait",
                   "Start three ranks one by one")
          .events(
              {job::step_event(
                   {num_split,
                    {"batch_s", kNumber, "seconds from the cut of the batch to its update"},
                    samples_per_s,
                    with_data("of the batch")}),
               job::eval_event(
                   "printed at the end of each epoch (--valid-data) or of the job (--test-data)"),
               {"split",
                "printed at the end of the run for each number in --micro-batches",
                {num_split,
                 {"schedule", kText, "schedule of the run (--schedule)"},
                 {"batches", kInteger, "batches of the run"},
                 {"batch_size", kInteger, "images per batch"},
                 {"wall_s", kNumber, "seconds that the run took"},
                 {"batch_s", kNumber, "median seconds per batch, without the first batch"},
                 {"stage_s", kNumbers,
                  "median compute time of each stage per batch in seconds; null on a GPU"},
                 {"activations", kIntegers,
                  "largest number of micro-batches whose activations each stage held, without "
                  "prefetched ones"},
                 samples_per_s,
                 {"loss", kNumber, "loss of the last batch"},
                 with_data("of the last batch")}},
               {"end",
                "",
                {sometimes({"loss", kNumber, "loss of the last batch"}),
                 sometimes({"num_split", kInteger, "micro-batches per batch of the last run"}),
                 sometimes({"batch_s", kNumber, "median seconds per batch of the last run"}),
                 sometimes(samples_per_s), with_data("of the last evaluation or batch"),
                 sometimes({"eval", kObject, "the last evaluation", job::eval_event("").fields}),
                 sometimes(best)}}})
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
              base::invalid("--epochs and --batches both limit the training: give one of them");
            }
            if (preflight.has_rank_0) check_pipeline(options);  // rank 0 checks for all ranks
          })
          .answer([](const PipelineOptions& options) -> std::optional<std::string> {
            if (!options.explain) return std::nullopt;
            return explain_pipeline(options, isatty(STDOUT_FILENO) != 0);
          })
          .has_stages()
          .change([](job::OptionTable& table) {
            std::ranges::find(table, "rpc-timeout", &job::Option::name)->details =
                "Calls that wait for a stage to compute have no deadline.";
            job::Option& inject = *std::ranges::find(table, "inject", &job::Option::name);
            inject.help += ", stage=100ms";
            inject.details +=
                "\n`stage` makes each stage sleep for this time instead of computing a batch's "
                "forward pass, and\nagain instead of its backward pass.";
          });
  return kJob;
}

}  // namespace distrain
