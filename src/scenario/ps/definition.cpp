// distrain ps: its options and ranks.

#include <filesystem>

#include <fmt/format.h>

#include "distrain/base/error.h"
#include "distrain/scenario/ps.h"

namespace distrain::scenario {

namespace {

/// Of Debian's package dataset-fashion-mnist, with the mean and deviation of its training images.
constexpr const char* kDebianFolder = "/usr/share/datasets/fashion-mnist";
constexpr double kDebianMean = 0.286;
constexpr double kDebianStd = 0.353;

/// Debian's Fashion-MNIST where it is installed, and its normalisation where it is used: that
/// follows from the data that this rank reads, whatever rank 0 has.
void settle(PsOptions& options, const std::function<bool(std::string_view)>& given) {
  namespace fs = std::filesystem;
  std::error_code ignored;
  if (options.data.empty() && fs::is_directory(kDebianFolder, ignored)) {
    options.data = kDebianFolder;
  }
  if (!fs::equivalent(options.data, kDebianFolder, ignored)) return;
  if (!given("mean")) options.mean = kDebianMean;
  if (!given("std")) options.std = kDebianStd;
}

/// Of what the two options say of the server, if both say something.
void check_gpus(const PsOptions& options, const job::Preflight& preflight) {
  if (!options.num_gpus || !preflight.given("device")) return;
  const std::string device = preflight.text("device");
  const cuda::DeviceSpec spec(device, c10::kCUDA, ps_job().info().roles);
  const auto server = spec.for_all() ? spec.for_all() : spec.named("parameter_server");
  const int gpus = *options.num_gpus;
  if (!server) return;
  const bool same_kind = server->accelerator == (gpus > 0);
  if (same_kind && (!server->index || (gpus == 1 && *server->index == 0))) return;
  base::invalid(fmt::format("--num-gpus {} and --device {} put the server on different devices",
                            gpus, device));
}

void check(const PsOptions& options, const job::Preflight& preflight) {
  const bool adopted = preflight.of_rank_0 != nullptr;
  if (!adopted) check_gpus(options, preflight);
  // The trainers read the data. One that joins without --data is yet to hear from rank 0 where.
  const bool final = preflight.has_rank_0 || adopted;
  if (final && preflight.starts("trainer") && options.data.empty()) {
    base::bad_data(
        "no --data and Debian's dataset-fashion-mnist is not installed: `apt-get install "
        "dataset-fashion-mnist`, or give a folder with MNIST's IDX files "
        "(train-images-idx3-ubyte[.gz], ...)");
  }
  if (preflight.has_rank_0 && preflight.given("staleness") && options.mode != "ssp") {
    preflight.warn("--staleness has no effect without --mode ssp");
  }
  if (preflight.local && options.verify_grads) {
    preflight.warn("--verify-grads has no effect with --local: no gradient travels");
  }
}

/// Of the server, or of the whole job with --local.
std::optional<int> gpus_of(const PsOptions& options, const std::string& rank_name) {
  return rank_name.starts_with("trainer") ? std::nullopt : options.num_gpus;
}

}  // namespace

PsOptions::PsOptions() { lr = 0.03; }

void PsOptions::describe(job::OptionList<PsOptions>& list) {
  list.integer("limit", &PsOptions::limit, "train on the first N examples; 0: on all")
      .may_change();  // it is the examples that have to be as many
  list.on_off_or_real("dropout", &PsOptions::dropout,
                      "share of channels and numbers set to 0 in training; on: the tutorial's, "
                      "0.25 and 0.5")
      .value_name("on|off|P")
      .below(0, 1);
  list.integer("num-gpus", &PsOptions::num_gpus,
               "GPUs of the server: with 2 the convolutions are on cuda:0, the rest on cuda:1")
      .range(0, 2)
      .by_default("as --device says")
      .of_predict()
      .details("With --local the whole job is there. The trainers are where --device says.");
  list.real("mean", &PsOptions::mean, "of the pixels, which is subtracted")
      .range(-1e6, 1e6)
      .by_default("0.1307, with Debian's Fashion-MNIST 0.286")
      .each_own();
  list.real("std", &PsOptions::std, "deviation of the pixels, divided by")
      .above(0, 1e6)
      .by_default("0.3081, with Debian's Fashion-MNIST 0.353")
      .each_own();
  list.folder("data", &PsOptions::data, "folder with MNIST's IDX files, plain or gzip")
      .by_default("Debian's dataset-fashion-mnist, if installed");
  list.folder("valid-data", &PsOptions::valid_data,
              "evaluate on this folder's test images after each epoch")
      .by_default("those of --data")
      .needs("data");
  list.folder("test-data", &PsOptions::test_data,
              "evaluate on this folder's test images at the end")
      .needs("data");
  list.group("Training");
  list.row("trainers").help("trainers; the job has one rank more").range(1, 1023);
  list.find("mode").choices.push_back("ssp");
  list.find("mode").help += "; ssp: async, but no trainer gets far ahead";
  list.integer("staleness", &PsOptions::staleness,
               "with --mode ssp: steps a trainer may be ahead of the slowest")
      .may_change();
  list.flag("verify-grads", &PsOptions::verify_grads,
            "check at every step that the gradients arrived")
      .may_change();
  list.row("mean").details("Pixels go from 0 to 1. Mean and deviation are always rank 0's.");
  list.row("data").details(
      R"(Its files are train-images-idx3-ubyte and train-labels-idx1-ubyte, and, to evaluate on,
t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte; each may end in .gz. Debian's are in
/usr/share/datasets/fashion-mnist. A trainer that joins without --data looks in the folder
that rank 0 names, and only if rank 0 has none in its own Debian folder.)");
  list.row("valid-data").details("Such files as in --data, normalised as those.");
  list.row("test-data").details("As --valid-data.");
  list.row("staleness").details("0 keeps them abreast.");
  list.row("verify-grads").details("When they have not, the job ends with exit status 1.");
}

const job::Definition<PsOptions>& ps_job() {
  using Use = cuda::DeviceRole::Use;
  using enum job::FieldType;
  static const auto kJob =
      job::define<PsOptions>(
          "ps", "a convolutional net on a parameter server, trained by several trainers")
          .describe(
              R"(Trains an image classifier that a parameter server holds whole: the trainers send it
their batches over RPC, which it passes through the net, and the gradients come about in
distributed autograd. Rank 0 is the server, ranks 1 to T are the trainers.)")
          .details(
              R"(The net has two convolutions, max pooling and two linear layers. Several trainers' passes run
at the same time, each with the parameters as they were when it began. `parameter_server`,
`trainer1`, `trainer2`, ... are the ranks' roles. The server does not read the data.

`distrain predict CHECKPOINT [FILE]` gives the classes, 0 to 9, of the images in an IDX file,
plain or gzip, or of those to evaluate on in a folder. Where there is a file of labels beside it
it says how many are right.)")
          .example(
              "distrain ps | jq -c 'select(.event == \"eval\" or .event == \"end\")'",
              "Fashion-MNIST as Debian's dataset-fashion-mnist has it: one epoch, two trainers")
          .example("distrain ps --data mnist --trainers 3", "MNIST in the folder mnist")
          .example("distrain ps --checkpoint saved --checkpoint-every 200 --resume auto",
                   "A job that may be ended by a signal and goes on where it was")
          .example("distrain predict saved t10k-images-idx3-ubyte",
                   "What the newest checkpoint in the folder saved makes of images")
          .example("for r in 0 1 2; do distrain ps --rank $r & done; wait",
                   "Three ranks that are started one by one")
          .example("distrain ps --mode ssp --staleness 4 --trainers 3 --inject delay=50ms@rank=2",
                   "What a slow trainer does to the others")
          .event("step", "",
                 {{"staleness", kInteger,
                   "steps that this trainer was ahead of the slowest when the step began"},
                  {"version", kInteger,
                   "updates that the parameters of its forward pass had had in this run"},
                  {"delay", kInteger, "updates of others between that and the step's own"}})
          .event("end", "",
                 {job::sometimes({"staleness", kInteger,
                                  "most steps that a trainer was ahead of the slowest"})})
          .role("parameter_server", 1, {}, Use::kCompute, "server")
          .role("trainer", &PsOptions::trainers, train_ps)
          .expose(expose_ps)
          .local(train_ps_local)
          .predict(predict_ps)
          .settle(settle)
          .check(check)
          .gpus(gpus_of);
  return kJob;
}

}  // namespace distrain::scenario
