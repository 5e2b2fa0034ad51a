#include "rnn.h"

#include "distrain/app/checks.h"
#include "distrain/app/option_blocks.h"
#include "distrain/base/error.h"
#include "distrain/scenario/rnn.h"

namespace distrain::cmd {

using namespace app;
using job::sometimes;
using enum job::FieldType;

namespace {

/// A default that is another one on random batches. It is in complete() that they become values.
struct TwoDefaults {
  const char* name;
  const char* with_data;
  const char* random;
};
constexpr TwoDefaults kTwoDefaults[] = {
    {"vocab-size", "10000", "10"}, {"emsize", "200", "2"}, {"nhid", "200", "3"},
    {"nlayers", "2", "4"},         {"bptt", "35", "10"},   {"dropout", "0.2", "0.5"},
    {"batch-size", "20", "5"},     {"lr", "20", "0.05"},   {"clip", "0.25", "0"},
    {"log-interval", "200", "0"},
};

/// The row without a default, which is shown in words.
Option two_defaults(Option option) {
  for (const TwoDefaults& row : kTwoDefaults) {
    if (option.name != row.name) continue;
    option.initial_in_words = std::string(row.with_data) + " with --data, else " + row.random;
  }
  return option;
}

OptionTable option_table() {
  OptionTable table;
  append(table, "Model and data", Scope::kJob,
         {integer("trainers", "1", 1, 1023, "trainers; the job has one rank more"),
          two_defaults(integer("vocab-size", "", 2, kMaxInt, "words that are told apart, at most")),
          two_defaults(integer("emsize", "", 1, 1048576, "numbers in a word's embedding")),
          two_defaults(integer("nhid", "", 1, 1048576, "numbers in the LSTM's hidden state")),
          two_defaults(integer("nlayers", "", 1, 1024, "layers of the LSTM")),
          two_defaults(but(real("dropout", "", 0, 1, "share of numbers set to 0 in training"),
                           [](Option& o) { o.below_max = true; }))});
  append(table, "Model and data", Scope::kInput,
         {by_default(text("data", "FILE", "train on this text, words between blanks"),
                     "random batches"),
          text("valid-data", "FILE", "evaluate on this text after each epoch")});
  append(table, "Training", Scope::kJob,
         {epochs_option("10"), steps_option(), random_batches_option("5"),
          two_defaults(integer("batch-size", "", 1, kMaxInt, "columns of text a trainer")),
          two_defaults(integer("bptt", "", 1, kMaxInt, "words a batch and column")),
          two_defaults(real("lr", "", 0, 1e6,
                            "learning rate; divided by 4 when --valid-data gets no better")),
          two_defaults(real("clip", "", 0, 1e6, "limit of the gradient's norm; 0: none")),
          mode_option(), seed_option(), two_defaults(log_interval_option(""))});
  append(table, "Sample", Scope::kJob,
         {data_only(integer("generate", "0", 0, 1048576, "words to write at the end")),
          data_only(text("prompt", "TEXT", "words that the sample begins with"))});
  append_checkpoints(table);
  append_common(table);
  return table;
}

scenario::RnnOptions rnn_options(const ParsedOptions& parsed) {
  auto options = trainer_options<scenario::RnnOptions>(parsed);
  options.batches = parsed.whole("batches");
  options.bptt = parsed.whole("bptt");
  options.vocab_size = parsed.whole("vocab-size");
  options.emsize = parsed.whole("emsize");
  options.nhid = parsed.whole("nhid");
  options.nlayers = parsed.whole("nlayers");
  options.dropout = parsed.real("dropout");
  options.clip = parsed.real("clip");
  options.valid_data = parsed.text("valid-data");
  options.generate = parsed.whole("generate");
  options.prompt = parsed.text("prompt");
  return options;
}

void complete(ParsedOptions& options) {
  const bool data = options.given("data");
  for (const TwoDefaults& row : kTwoDefaults) {
    options.derive(row.name, data ? row.with_data : row.random);
  }
}

void check(const ParsedOptions& options, Placement& placement) {
  if (placement.has_rank_0()) check_needs(options, "prompt", "generate");
  check_data_files(options, placement, "valid-data");
}

/// The model's size follows from whether rank 0 has data.
void check_adopted(const ParsedOptions& adopted, const OptionMap& of_rank_0) {
  const auto data = of_rank_0.find("data");
  if (!adopted.given("data") || (data != of_rank_0.end() && !data->second.empty())) return;
  throw base::Exception(base::ErrorKind::kRendezvous,
                        "--data is given here, but not to rank 0, which trains on random batches");
}

}  // namespace

JobCommand rnn_command() {
  JobCommand command;
  command.line = {"rnn", "a language model: embedding and decoder on a server, LSTM on trainers"};
  command.description =
      "Trains a word language model whose embedding table and decoder a parameter server holds,\n"
      "while the LSTM between them is the trainers', who share it by DistributedDataParallel\n"
      "when there are several. Rank 0 is the server, ranks 1 to T are the trainers.";
  command.details =
      "Each step goes to the server twice over RPC, and a distributed optimizer updates the "
      "parameters\n"
      "where they are. `ps`, `trainer1`, `trainer2`, ... are the ranks' roles.\n"
      "\n"
      "Without --data it is a tiny model on random batches, that of the PyTorch RPC tutorial; with "
      "it, a\n"
      "language model of use. Most defaults differ between the two.";
  command.examples = {
      {"distrain rnn", "The tutorial's job"},
      {"distrain rnn --data train.txt --valid-data valid.txt --epochs 2 --mode sync --trainers 2",
       "Two trainers, in step with each other"},
      {"distrain rnn --data train.txt --generate 40 --prompt 'in the beginning' | jq -r "
       ".text//empty",
       "A few words in the way of the text"},
      {"for r in 0 1; do distrain rnn --rank $r & done; wait",
       "Two ranks that are started one by one"},
  };
  command.table = option_table();
  describe(
      command.table,
      {{"vocab-size", "The most frequent ones; `<unk>` is all others, `<eos>` the end of a line."},
       {"data",
        "Each rank may be given a path of its own; one that is given none reads what "
        "rank 0 names."},
       {"valid-data", "Needs --data."},
       {"batch-size", "A trainer reads them side by side."},
       {"bptt", "So far the gradients go back."},
       {"clip", "The norm is over the parameters of all ranks together."},
       {"generate", "They come as a `text` line."},
       {"prompt", "Needs --generate."}});
  command.events = {
      job::step_event({{"words_per_s", kNumber, "words of this trainer a second"}}),
      job::epoch_event({{"perplexity", kNumber, "e to the power of the loss"}}),
      job::eval_event("at the end of an epoch, with --valid-data",
                      {{"perplexity", kNumber, "e to the power of the loss"},
                       {"lr", kNumber, "learning rate of the epoch"}}),
      {"text", "at the end, with --generate", {{"text", kText, "the prompt and what follows it"}}},
      {"end",
       "",
       {sometimes({"loss", kNumber, "mean over the words of the last epoch"}),
        sometimes({"perplexity", kNumber, "of the last evaluation, else of the last epoch"}),
        sometimes({"words_per_s", kNumber, "words a second of the first trainer"}),
        sometimes({"updates", kInteger, "of the server's parameters, in this run"}),
        sometimes({"ddp", kText, "how trainers on GPUs average: staged or nccl"})}}};
  using Use = job::DeviceRole::Use;
  command.devices.roles = {{"ps", "server", Use::kCompute}, {"trainer", "", Use::kCompute}};
  command.size = {"trainers", 1};
  command.complete = complete;
  command.check = check;
  command.role = [](const ParsedOptions&, int rank) { return scenario::rnn_role(rank); };
  command.run = run_of<scenario::RnnOptions>(
      {rnn_options, scenario::run_rnn, scenario::run_rnn_local, check_adopted});
  return command;
}

}  // namespace distrain::cmd
