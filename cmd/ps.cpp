#include "ps.h"

#include <algorithm>
#include <filesystem>

#include "distrain/app/checks.h"
#include "distrain/app/option_blocks.h"
#include "distrain/base/error.h"
#include "distrain/scenario/ps.h"

namespace distrain::cmd {

using namespace app;
using job::sometimes;
using enum job::FieldType;

namespace {

/// Of Debian's package dataset-fashion-mnist, with the mean and deviation of its training images.
constexpr const char* kDebianFolder = "/usr/share/datasets/fashion-mnist";
constexpr const char* kDebianMean = "0.286";
constexpr const char* kDebianStd = "0.353";

OptionTable option_table() {
  OptionTable table;
  append(
      table, "Model and data", Scope::kJob,
      {integer("trainers", "2", 1, 1023, "trainers; the job has one rank more"),
       integer("limit", "0", 0, kMaxInt, "train on the first N examples; 0: on all"),
       choice("dropout", {"on", "off"}, "of the model while it trains"),
       by_default(integer("num-gpus", "", 0, 2,
                          "GPUs of the server: with 2 the convolutions are on cuda:0, the rest on "
                          "cuda:1"),
                  "as --device says"),
       by_default(each_own(real("mean", "0.1307", -1e6, 1e6, "of the pixels, which is subtracted")),
                  "0.1307, with Debian's Fashion-MNIST 0.286"),
       by_default(each_own(but(real("std", "0.3081", 0, 1e6, "deviation of the pixels, divided by"),
                               [](Option& o) { o.above_min = true; })),
                  "0.3081, with Debian's Fashion-MNIST 0.353")});
  append(table, "Model and data", Scope::kInput,
         {by_default(text("data", "DIR", "folder with MNIST's IDX files, plain or gzip"),
                     "Debian's dataset-fashion-mnist, if installed")});
  append(table, "Training", Scope::kJob,
         {epochs_option("1"), steps_option(),
          integer("batch-size", "32", 1, kMaxInt, "examples a batch and trainer"),
          real("lr", "0.03", 0, 1e6, "learning rate"),
          choice("mode", {"async", "sync", "ssp"},
                 "async: each trainer's update as it comes; sync: one mean update a step; "
                 "ssp: async, but no trainer gets far ahead"),
          integer("staleness", "1", 0, kMaxInt,
                  "with --mode ssp: steps a trainer may be ahead of the slowest"),
          flag("verify-grads", "check at every step that the gradients arrived"), seed_option(),
          log_interval_option("5")});
  append_checkpoints(table);
  append_common(table);
  return table;
}

bool is_debian_folder(const ParsedOptions& options) {
  std::error_code ignored;
  return std::filesystem::equivalent(options.text("data"), kDebianFolder, ignored);
}

scenario::PsOptions ps_options(const ParsedOptions& parsed) {
  auto options = trainer_options<scenario::PsOptions>(parsed);
  options.staleness = parsed.integer("staleness");
  options.dropout = parsed.text("dropout") == "on";
  options.verify_grads = parsed.flag("verify-grads");
  options.limit = parsed.integer("limit");
  // Unless given they follow from the data that this rank reads, whatever rank 0 has.
  const bool fashion = is_debian_folder(parsed);
  const auto given_or = [&](const char* name, const char* debian) {
    if (parsed.given(name)) return parsed.real(name);
    return std::stod(fashion ? debian : find_option(parsed.table(), name)->initial);
  };
  options.mean = given_or("mean", kDebianMean);
  options.std = given_or("std", kDebianStd);
  return options;
}

/// Debian's Fashion-MNIST where it is installed, and its normalisation where it is used.
void complete(ParsedOptions& options) {
  std::error_code ignored;
  if (!options.given("data") && std::filesystem::is_directory(kDebianFolder, ignored)) {
    options.derive("data", kDebianFolder);
  }
  if (!is_debian_folder(options)) return;
  options.derive("mean", kDebianMean);
  options.derive("std", kDebianStd);
}

void check_data(const ParsedOptions& options) {
  if (options.text("data").empty()) {
    throw base::Exception(
        base::ErrorKind::kBadData,
        "no --data and Debian's dataset-fashion-mnist is not installed: `apt-get install "
        "dataset-fashion-mnist`, or give a folder with MNIST's IDX files "
        "(train-images-idx3-ubyte[.gz], ...)");
  }
  check_folder(options, "data");
}

/// `--num-gpus`, which is the server's, or the whole job's with --local.
std::optional<int> gpus_of(const ParsedOptions& options, const std::string& rank_name) {
  if (options.text("num-gpus").empty() || rank_name.starts_with("trainer")) return std::nullopt;
  return options.whole("num-gpus");
}

DeviceRules device_rules() {
  using Use = job::DeviceRole::Use;
  return {{{"parameter_server", "server", Use::kCompute}, {"trainer", "", Use::kCompute}}, gpus_of};
}

/// Of what the two options say of the server, if both say something.
void check_gpus(const ParsedOptions& options) {
  if (!options.given("num-gpus") || !options.given("device")) return;
  const job::DeviceSpec spec = device_spec(options, device_rules());
  const auto server = spec.for_all() ? spec.for_all() : spec.named(scenario::ps_role(0));
  const int gpus = options.whole("num-gpus");
  if (!server) return;
  const bool same_kind = server->accelerator == (gpus > 0);
  if (same_kind && (!server->index || (gpus == 1 && *server->index == 0))) return;
  throw base::Exception(base::ErrorKind::kInvalid, "--num-gpus " + options.text("num-gpus") +
                                                       " and --device " + options.text("device") +
                                                       " put the server on different devices");
}

/// The trainers read the data, the server does not.
bool has_trainers(const Placement& placement) {
  if (placement.mode == Placement::Mode::kSpawn) return placement.ranks.back() > 0;
  return placement.mode == Placement::Mode::kLocal || placement.rank > 0;
}

void check(const ParsedOptions& options, Placement& placement) {
  check_gpus(options);
  // A trainer that joins without --data is yet to hear from rank 0 where it is.
  const bool final = placement.has_rank_0() || options.given("data");
  if (final && has_trainers(placement)) check_data(options);
  if (placement.has_rank_0() && options.given("staleness") && options.text("mode") != "ssp") {
    placement.warn("--staleness has no effect without --mode ssp");
  }
  if (placement.mode == Placement::Mode::kLocal && options.given("verify-grads")) {
    placement.warn("--verify-grads has no effect with --local: no gradient travels");
  }
}

}  // namespace

JobCommand ps_command() {
  JobCommand command;
  command.line = {"ps", "a convolutional net on a parameter server, trained by several trainers"};
  command.description =
      "Trains an image classifier that a parameter server holds whole: the trainers send it\n"
      "their batches over RPC, which it passes through the net, and the gradients come about in\n"
      "distributed autograd. Rank 0 is the server, ranks 1 to T are the trainers.";
  command.details =
      "The net has two convolutions, max pooling and two linear layers. Several trainers' passes "
      "run\n"
      "at the same time, each with the parameters as they were when it began. `parameter_server`,\n"
      "`trainer1`, `trainer2`, ... are the ranks' roles. The server does not read the data.";
  command.examples = {
      {"distrain ps | jq -c 'select(.event == \"eval\" or .event == \"end\")'",
       "Fashion-MNIST as Debian's dataset-fashion-mnist has it: one epoch, two trainers"},
      {"distrain ps --data mnist --trainers 3", "MNIST in the folder mnist"},
      {"distrain ps --checkpoint saved --checkpoint-every 200 --resume auto",
       "A job that may be ended by a signal and goes on where it was"},
      {"for r in 0 1 2; do distrain ps --rank $r & done; wait",
       "Three ranks that are started one by one"},
      {"distrain ps --mode ssp --staleness 4 --trainers 3 --inject delay=50ms@rank=2",
       "What a slow trainer does to the others"},
  };
  command.table = option_table();
  describe(
      command.table,
      {{"num-gpus", "With --local the whole job is there. The trainers are where --device says."},
       {"mean", "Pixels go from 0 to 1. Mean and deviation are always rank 0's."},
       {"data",
        "Its files are train-images-idx3-ubyte and train-labels-idx1-ubyte, and, to evaluate on,\n"
        "t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte; each may end in .gz. Debian's are in\n"
        "/usr/share/datasets/fashion-mnist. A trainer that joins without --data looks in the "
        "folder\n"
        "that rank 0 names, and only if rank 0 has none in its own Debian folder."},
       {"staleness", "0 keeps them abreast."},
       {"verify-grads", "When they have not, the job ends with exit status 1."}});
  command.events = {
      job::step_event({{"samples_per_s", kNumber, "examples of this trainer a second"},
                       {"staleness", kInteger,
                        "steps that this trainer was ahead of the slowest when the step began"},
                       {"version", kInteger,
                        "updates that the parameters of its forward pass had had in this run"},
                       {"delay", kInteger, "updates of others between that and the step's own"}}),
      job::epoch_event(),
      job::eval_event("at the end of an epoch, if there are test images",
                      {{"accuracy", kNumber, "share of the images whose class is right"}}),
      {"end",
       "",
       {sometimes({"loss", kNumber, "mean over the last epoch's steps"}),
        sometimes({"accuracy", kNumber, "of the last evaluation"}),
        sometimes({"staleness", kInteger, "most steps that a trainer was ahead of the slowest"}),
        sometimes({"updates", kInteger, "of the parameters, in this run"})}}};
  command.devices = device_rules();
  command.size = {"trainers", 1};
  command.complete = complete;
  command.check = check;
  command.role = [](const ParsedOptions&, int rank) { return scenario::ps_role(rank); };
  command.run = run_of<scenario::PsOptions>(
      {ps_options, scenario::run_ps, scenario::run_ps_local,
       [](const ParsedOptions& adopted, const OptionMap&) { check_data(adopted); }});
  return command;
}

}  // namespace distrain::cmd
