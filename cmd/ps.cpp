// distrain ps: its options, roles and help.

#include <filesystem>

#include <fmt/format.h>

#include "distrain/base/error.h"
#include "jobs.h"

namespace distrain {

using namespace scenario;

namespace {

/// Sets the default of --data to Debian's Fashion-MNIST if it is installed. Sets the defaults of
/// --mean and --std for that data set if this rank reads it, even if rank 0 reads other data.
void derive_ps_defaults(PsOptions& options, const std::function<bool(std::string_view)>& given) {
  namespace fs = std::filesystem;
  constexpr const char* kDebian = "/usr/share/datasets/fashion-mnist";
  std::error_code ignored;
  if (options.data.empty() && fs::is_directory(kDebian, ignored)) options.data = kDebian;
  if (!fs::equivalent(options.data, kDebian, ignored)) return;
  if (!given("mean")) options.mean = 0.286;  // mean and deviation of Debian's images
  if (!given("std")) options.std = 0.353;
}

/// Throws `invalid` if `--num-gpus` does not fit `--servers` or `--device`.
void check_gpus(const PsOptions& options, const job::Preflight& preflight) {
  const bool is_spread = options.servers > 1 && !preflight.local;
  if (preflight.given("num-gpus") && options.num_gpus.value_or(0) > 0 && is_spread) {
    base::invalid("--num-gpus needs one server: with --servers, give --device server=cuda");
  }
  if (!options.num_gpus || is_spread || !preflight.given("device")) return;
  const std::string device = preflight.text("device");
  const job::DeviceSpec spec(device, cmd::ps_job().info().roles);
  const auto server = spec.for_all() ? spec.for_all() : spec.named("parameter_server");
  const int gpus = *options.num_gpus;
  if (!server) return;
  const bool same_kind = server->is_cuda() == (gpus > 0);
  if (same_kind && (!server->has_index() || (gpus == 1 && server->index() == 0))) return;
  base::invalid(fmt::format("--num-gpus {} and --device {} put the server on different devices",
                            gpus, device));
}

void check_ps(const PsOptions& options, const job::Preflight& preflight) {
  const bool adopted = preflight.of_rank_0 != nullptr;
  if (!adopted) check_gpus(options, preflight);
  // Only trainers read the data. A joining rank is checked again once it has rank 0's --data.
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
  if (preflight.local && preflight.given("servers")) {
    preflight.warn("--servers has no effect with --local, which has no servers");
  }
  if (preflight.local && options.verify_grads) {
    preflight.warn("--verify-grads has no effect with --local, which sends no gradients");
  }
}

}  // namespace

void PsOptions::describe(job::OptionList<PsOptions>& list) {
  list.integer("limit", &PsOptions::limit, "train on the first N examples; 0 trains on all")
      .may_change();  // a resume compares the number of examples instead of its limit
  list.on_off_or_real("dropout", &PsOptions::dropout,
                      "drop activations with probability P in training; on means 0.25 and 0.5")
      .value_name("on|off|P")
      .below(0, 1);
  list.integer("num-gpus", &PsOptions::num_gpus,
               "put the server on N GPUs; 2 puts convolutions on cuda:0 and the rest on cuda:1")
      .range(0, 2)
      .by_default("from --device")
      .of_predict()
      .details("With --local the whole job uses them; otherwise --device places the trainers.");
  list.real("mean", &PsOptions::mean, "subtract this mean from the pixels")
      .range(-1e6, 1e6)
      .by_default("0.1307, or 0.286 for Debian's Fashion-MNIST")
      .each_own();
  list.real("std", &PsOptions::std, "divide the pixels by this standard deviation")
      .above(0, 1e6)
      .by_default("0.3081, or 0.353 for Debian's Fashion-MNIST")
      .each_own();
  list.folder("data", &PsOptions::data, "train on MNIST's IDX files in DIR, plain or gzip")
      .by_default("Debian's dataset-fashion-mnist, if installed");
  list.folder("valid-data", &PsOptions::valid_data,
              "evaluate on the test images in DIR after each epoch")
      .by_default("the folder of --data")
      .needs("data");
  list.folder("test-data", &PsOptions::test_data, "evaluate on the test images in DIR at the end")
      .needs("data");
  list.group("Training");
  list.row("trainers").help("run N trainers beside the servers").range(1, 1023);
  list.integer("accumulate", &PsOptions::accumulate, kAccumulateHelp).range(1, 1e6).of_training();
  list.integer("servers", &PsOptions::servers, "spread the net's parameters over N servers by size")
      .range(1, static_cast<double>(ConvNet::names().size()))  // each server has a parameter
      .may_change()
      .details(
          R"(The largest parameter is assigned first, and each goes to the server with the fewest bytes. Trainers
fetch the parameters from all servers for each forward pass, which the trainers then run. If a trainer
is lost in mode async or ssp, some servers may have applied its last step and others not. The step
counts as made if rank 0 has applied it; otherwise another trainer makes it again, on all servers.)");
  list.find("mode").choices.push_back("ssp");
  list.find("mode").help += "; ssp: async within --staleness";
  list.integer("staleness", &PsOptions::staleness,
               "with --mode ssp: let a trainer be at most N steps ahead of the slowest")
      .may_change();
  list.flag("verify-grads", &PsOptions::verify_grads,
            "check at each step that every gradient reached the server and is finite")
      .may_change();
  list.row("mean").details("Pixels range from 0 to 1. All ranks use --mean and --std of rank 0.");
  list.row("data").details(
      R"(The training files are train-images-idx3-ubyte and train-labels-idx1-ubyte, and the test files are
t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte; each may end in .gz. Debian's files are in
/usr/share/datasets/fashion-mnist. A trainer that joins without --data reads the folder that rank 0
names, or Debian's folder if rank 0 names none.)");
  list.row("valid-data").details("The files are named and normalised as those of --data.");
  list.row("test-data").details("See --valid-data.");
  list.row("staleness").details("0 keeps the trainers in step.");
  list.row("verify-grads")
      .details("A missing gradient ends the job with exit status 1, a non-finite one with 8.");
}

const job::Definition<PsOptions>& cmd::ps_job() {
  static const auto kJob =
      job::define<PsOptions>("ps", "train a ConvNet on a parameter server with several trainers")
          .describe(
              R"(Trains an image classifier on a parameter server that holds the whole net.
Trainers send their batches to the server over RPC, the server runs the forward
pass, and distributed autograd runs the backward pass. Rank 0 is the server, and
ranks 1 to T are the trainers. With --servers S, ranks 0 to S-1 are servers that
share the net's parameters, and the trainers run the forward passes.)")
          .details(
              R"(The net has two convolutions, max pooling and two linear layers. The passes of several trainers
run at the same time; each pass uses the parameters that were current at its start. The ranks' roles
are `parameter_server`, `trainer1`, `trainer2`, ..., or, with two servers, `parameter_server0`,
`parameter_server1`, `trainer2`, .... Only the trainers read the data.

`distrain predict CHECKPOINT [FILE]` prints the classes, 0 to 9, of the images in an IDX file, plain
or gzip, or of the test images in a folder. If there is a file of labels beside the images, `end`
has the accuracy.)")
          .example("distrain ps | jq -c 'select(.event == \"eval\" or .event == \"end\")'",
                   "Train on Debian's Fashion-MNIST for one epoch with two trainers")
          .example("distrain ps --data mnist --trainers 3", "Train on MNIST in the folder mnist")
          .example("distrain ps --checkpoint saved --checkpoint-every 200 --resume auto",
                   "Save on a signal and resume when started again")
          .example("distrain predict saved t10k-images-idx3-ubyte",
                   "Classify images with the newest checkpoint in the folder saved")
          .example("for r in 0 1 2; do distrain ps --rank $r & done; wait",
                   "Start three ranks one by one")
          .example("distrain ps --mode ssp --staleness 4 --trainers 3 --inject delay=50ms@rank=2",
                   "See what a slow trainer does to the others")
          .event("step", "",
                 {{"staleness", kInteger,
                   "steps that this trainer was ahead of the slowest when the step began"},
                  {"version", kInteger, "number of updates in this run before the forward pass"},
                  {"delay", kInteger,
                   "updates by other trainers between the forward pass and the step's own"}})
          .event("end", "",
                 {sometimes({"staleness", kInteger,
                             "most steps that a trainer was ahead of the slowest"})})
          .role("parameter_server", &PsOptions::servers, {}, Use::kCompute, "server")
          .role("trainer", &PsOptions::trainers, train_ps)
          .expose(expose_ps)
          .local(train_ps_local)
          .predict(predict_ps)
          .derive_defaults(derive_ps_defaults)
          .check(check_ps)
          .takes_turns([](const PsOptions& o) { return o.trainers == 1 && o.servers == 1; })
          .gpus([](const PsOptions& options, const std::string& rank) {
            // --num-gpus is for the server only. With --local, the job's only process uses them.
            return rank.starts_with("trainer") || options.servers > 1 ? std::nullopt
                                                                      : options.num_gpus;
          });
  return kJob;
}

}  // namespace distrain
