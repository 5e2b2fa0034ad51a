// distrain hybrid: its options, roles and help.

#include "jobs.h"

namespace distrain {

using namespace scenario;

void HybridOptions::describe(job::OptionList<HybridOptions>& list) {
  using Self = HybridOptions;
  list.without("min-trainers");  // trainers keep replicas, so the job cannot lose one
  list.integer("num-embeddings", &Self::num_embeddings,
               "give the embedding table N rows, or with a file one for each word")
      .range(1, job::kMaxInt)
      .random_only();
  list.integer("embedding-dim", &Self::embedding_dim, "give each row N numbers").range(1, 1048576);
  list.integer("classes", &Self::classes, "predict N classes, or with a file its labels")
      .range(1, 1048576)
      .random_only();
  list.choice("task", &Self::task, {"classes", "binary"},
              "predict one of several classes, or the second of two (log loss, AUC)")
      .details(R"(
`binary` has one output, the log-odds of the second label in the order of their names. `eval` and `end` then
have the area under the ROC curve (auc), and loss is the log loss. Without a file it needs --classes 2.)");
  list.integers("dense", &Self::dense, "put hidden ReLU layers of these sizes before the output")
      .range(1, 65536);
  list.choice("table", &Self::table, {"module", "sharded"},
              "hold the embedding in a module on one server, or spread its rows over servers")
      .by_default("module, or sharded if an option needs it")
      .details(R"(
`module` is the tutorial's way: one RemoteModule, whose gradient distributed autograd sends back.
`sharded` keeps each row, with its optimizer state, on the server that the hash of its id selects; a
row is made when it is first looked up for training. Each step sends one lookup and one update to each
server, and the next step's lookup does not wait for the update to return. --servers, --hash-bits,
--max-rows, --prefetch, --wire-dtype and --optimizer rowwise-adagrad imply it. Of the optimizers' options,
a sharded table has --lr and, with adamw, --weight-decay; adam, adamw and rmsprop change only the rows
of a step, as torch.optim.SparseAdam.)");
  list.integer("servers", &Self::servers, "spread the table's rows over N servers")
      .range(1, 256)
      .may_change();
  list.integer("hash-bits", &Self::hash_bits,
               "number words by N bits of their hash, without a vocabulary; 0 keeps a vocabulary")
      .range(0, 62)
      .data_only();
  list.integer("max-rows", &Self::max_rows, "hold at most N rows on a server; 0 sets no limit")
      .range(0, 1e12)
      .may_change();
  list.integer("prefetch", &Self::prefetch,
               "look up the rows of N batches ahead, which then lack the updates in between")
      .range(0, 64)
      .details(R"(
Needs --mode async. `step` lines tell how many updates the rows lack (staleness). Trainers ask rank 0 for steps of
about a quarter of a second at a time, and look up ahead only within these steps.)")
      .may_change();
  list.choice("wire-dtype", &Self::wire_dtype, {"fp32", "bf16", "fp16"},
              "send rows and gradients in this type")
      .of_training();
  std::vector<std::string>& rules = list.find("optimizer").choices;
  rules.insert(rules.begin() + 2, optim::kRowwiseAdagrad);
  list.row("optimizer").details(R"(
`rowwise-adagrad` keeps one sum of squares for each row of a sharded table, and updates the dense layers
by adagrad.)");
  list.files("data", &Self::data,
             "train on lines of '__label__X word word ...' or Criteo's; teacher makes learnable "
             "random batches")
      .or_word(HybridOptions::kTeacher)
      .by_default("random batches with random labels")
      .details(R"(
The format of a file is fastText's: each line has a label and words separated by blanks; or Criteo's, with
--hash-bits: a label of 0 or 1, 13 numbers and 26 categories, separated by tabs. Files may be compressed
by gzip. Give --data several times, or a quoted pattern such as 'day_*.gz', for several files. A single
plain fastText file below --in-memory is read into memory, unless --bad-rows skip or --steps-per-epoch is
given; other data is a stream, of which each trainer reads a part, and may be larger than memory.
Trainers whose part ends before the others' take part in the remaining steps without data (see
--average-over). A pipe, or - for the standard input, is a stream that rank 0 reads. With `teacher`,
batches are random, and a hidden teacher derived from --seed makes their labels; 1,000 other examples
are evaluated after each epoch. Random labels are those of the PyTorch tutorial: nothing can be
learned, and the loss stays near the logarithm of --classes. Use ./teacher for a file of that name.)");
  list.file("valid-data", &Self::valid_data, "evaluate on FILE after each epoch").needs("data");
  list.file("test-data", &Self::test_data, "evaluate on FILE at the end").needs("data");
  list.text("in-memory", &Self::in_memory, "SIZE",
            "read a file of fewer bytes into memory, and stream others; 0 streams all")
      .details(
          "SIZE is a number of bytes with an optional unit, as 64MB or 2GiB. Gzip is streamed.")
      .data_only()
      .may_change();
  list.choice("data-from", &Self::data_from, {"auto", "each", "rank0"},
              "each trainer reads its part of a stream, or rank 0 reads all and hands out batches")
      .details(R"(
With `auto`, rank 0 reads a pipe, or gzip files of which there are fewer than trainers. With `rank0` only
rank 0 needs the data.)")
      .data_only()
      .may_change();  // a resume compares the choice of `auto` instead
  list.choice("data-format", &Self::data_format, {"auto", "fasttext", "criteo"},
              "read streams in this format; auto looks at the first line")
      .data_only();
  list.text("labels", &Self::labels, "NAME[,...]",
            "use these labels for streams of hashed words, without a look at the data")
      .by_default("the labels of the first 65,536 examples")
      .may_be_empty()
      .data_only();
  list.integer("shuffle-buffer", &Self::shuffle_buffer,
               "shuffle streamed examples in blocks of N; 0 keeps the order of the files")
      .range(0, job::kMaxInt)
      .data_only();
  list.choice("bad-rows", &Self::bad_rows, {"stop", "skip"},
              "end the job at a malformed line of a stream, or skip and count it")
      .data_only();
  list.group("Training");
  list.integer("batches-per-epoch", &Self::batches, "use N generated batches per epoch and trainer")
      .range(1, job::kMaxInt)
      .formerly("batches")
      .random_only();
  list.integer("steps-per-epoch", &Self::steps_per_epoch,
               "end an epoch of streams after N steps, and go on in the data; 0 sets no limit")
      .range(0, 1e12)
      .data_only();
  list.choice("average-over", &Self::average_over, {"data", "trainers"},
              "when a trainer's stream has ended, average over those with data or over all")
      .details("`trainers` is the default of torch.distributed.algorithms.Join.")
      .data_only();
  list.row("batch-size").help("use N examples per trainer and batch, with a file").data_only();
  list.integer("accumulate", &Self::accumulate, kAccumulateHelp).range(1, 1e6).data_only();
  list.choice("gradient-dtype", &Self::gradient_dtype, {"float32", "float16", "bfloat16"},
              kGradientDtypeHelp)
      .of_training();
}

namespace {

/// Throws `invalid` for options that streams do not have.
void check_streams(const HybridOptions& options, const job::Preflight& preflight) {
  std::vector<std::string> labels = options.labels;
  std::ranges::sort(labels);
  const bool twice = std::ranges::adjacent_find(labels) != labels.end();
  if (twice || (!labels.empty() && labels[0].empty()) || labels.size() == 1) {
    base::invalid("--labels: expected two or more different names");
  }
  if (!labels.empty() && options.data_format == "criteo") {
    base::invalid("--labels: the labels of --data-format criteo are 0 and 1");
  }
  const std::string data = "--data " + options.data;
  const std::vector<std::string> paths = data::expand_paths(data::split_paths(options.data));
  if (std::ranges::none_of(paths, data::is_pipe)) {
    options.format_of(paths);
    return;
  }
  if (options.trainers > 1 && options.data_from == "each") {
    base::invalid(data + ": one process can read a pipe: give --data-from rank0, or --trainers 1");
  }
  if (options.epochs > 1 && options.steps_per_epoch == 0) {
    base::invalid(data + ": a pipe can be read once: give --epochs 1, or --steps-per-epoch");
  }
  const bool restarts = preflight.given("max-restarts") && preflight.text("max-restarts") != "0";
  if (preflight.given("resume") || restarts) {
    base::invalid((restarts ? "--max-restarts" : "--resume") + std::string(" cannot go on with ") +
                  data + ", because a pipe can be read once");
  }
  const bool needs_labels = options.data_format == "fasttext" && labels.empty();
  const std::string what = options.hash_bits == 0          ? "--hash-bits"
                           : options.data_format == "auto" ? "--data-format"
                           : needs_labels                  ? "--labels"
                                                           : "";
  if (what.empty()) return;
  base::invalid(data + ": a pipe can be read once, and not before the training: give " + what);
}

void check(const HybridOptions& options, const job::Preflight& preflight) {
  const std::string devices = options.is_sharded() ? preflight.text("device") : "";
  for (const std::string_view device : base::split(devices, ',')) {
    const bool is_server = device.starts_with("ps") || device.starts_with("server");
    if (is_server && !device.ends_with("=cpu")) {
      base::invalid("--table sharded keeps its rows in host memory: give --device trainer=" +
                    std::string(device.substr(device.find('=') + 1)));
    }
  }
  if (!preflight.has_rank_0) return;
  if (!base::byte_count(options.in_memory)) {
    base::invalid("--in-memory " + options.in_memory + ": expected a size such as 256MB");
  }
  if (options.streams()) {
    check_streams(options, preflight);
  } else if (data::is_pipe(options.data) && !preflight.local && options.trainers > 1) {
    base::invalid("--data " + options.data +
                  ": a pipe feeds one process: give --hash-bits, --local or --trainers 1");
  }
  if (options.is_binary() && !options.has_text() && options.classes != 2) {
    base::invalid("--task binary predicts two classes: give --classes 2");
  }
  if (!options.is_sharded()) {
    const std::string option = options.sharded_option();
    if (!option.empty()) base::invalid(option + " needs --table sharded");
    return;
  }
  optim::UpdateRule(options.rule().options).row_rule();  // throws for options that rows lack
  if (options.prefetch > 0 && options.mode == "sync") {
    base::invalid(
        "--prefetch needs --mode async: in sync mode a lookup includes all earlier steps");
  }
  for (const char* option : {"servers", "prefetch", "wire-dtype"}) {
    if (!preflight.local || !preflight.given(option)) continue;
    preflight.warn("--" + std::string(option) + " has no effect with --local" +
                   (preflight.given("table") ? "" : " apart from implying --table sharded"));
  }
}

}  // namespace

const job::Definition<HybridOptions>& cmd::hybrid_job() {
  static const auto kJob =
      job::define<HybridOptions>("hybrid",
                                 "train embeddings on a parameter server, dense layers under DDP")
          .describe(
              R"(Trains a text classifier. Its EmbeddingBag is on a parameter server, and
trainers look up rows over RPC. Its Linear layer is replicated on the trainers
with DistributedDataParallel. Ranks 0 to T-1 are the trainers, rank T is the
master, and rank T+1 is the parameter server. With --servers S, ranks T+1 to
T+S hold the rows of the table.)")
          .details(
              R"(Distributed autograd sends the gradients of the rows back to the server, unless the table is sharded.
The ranks' roles are `trainer0`, `trainer1`, ..., `master` and `ps`, or `ps3`, `ps4`, ... if there are several
servers. Only the trainers read the data, and each trainer may be given its own path.

`distrain predict CHECKPOINT [FILE]` prints the labels of examples in the format of --data, with or
without a label. Words that are not in the training data are ignored, or have their initial values
with --hash-bits.)")
          .example("distrain hybrid --data teacher", "Learn the labels of a hidden teacher")
          .example("distrain hybrid", "Run the tutorial's job; nothing can be learned")
          .example(
              "distrain hybrid --data clicks --hash-bits 26 --servers 4 --optimizer "
              "rowwise-adagrad --task binary",
              "Spread a table of hashed words over four servers")
          .example("distrain hybrid --epochs 20 --mode sync",
                   "Keep the trainers in step with each other")
          .example(
              "distrain hybrid --data r8.train --test-data r8.test --optimizer adagrad "
              "--epochs 15",
              "Train on text")
          .example("distrain predict saved r8.test | jq -r .label//empty",
                   "Label texts with the newest checkpoint in the folder saved")
          .example("for r in 0 1 2 3; do distrain hybrid --rank $r & done; wait",
                   "Start four ranks one by one")
          .example("distrain hybrid --ranks 0-1 --master-addr node0",
                   "Start the first two ranks on node0; on another machine give --ranks 2-3")
          .derive_defaults([](HybridOptions& options, const auto& given) {
            if (!given("table") && !options.sharded_option().empty()) options.table = "sharded";
          })
          .check(check)
          .gpus([](const HybridOptions& options, const std::string& rank) {
            return options.is_sharded() && rank.starts_with("ps") ? std::optional(0) : std::nullopt;
          })
          .saving_role([](const HybridOptions& options) {
            return options.is_sharded() ? std::string("ps") : std::string();
          })
          .event("step", "",
                 {sometimes({"staleness", kInteger,
                             "updates of this trainer that the rows of this step lack"})})
          .event("end", "",
                 {sometimes(
                     {"unknown_words", kInteger,
                      "evaluated words that are ignored because the training data lacks them"})})
          .role("trainer", &HybridOptions::trainers, train_hybrid)
          .role("master", 1, {}, Use::kNone)
          .role("ps", &HybridOptions::servers, {}, Use::kCompute, "server")
          .expose<EmbeddingTable>("EmbeddingTable")
          .expose(expose_hybrid)
          .local(train_hybrid_local)
          .predict(predict_hybrid);
  return kJob;
}

}  // namespace distrain
