// distrain rnn: its options, roles and help.

#include "distrain/base/error.h"
#include "distrain/base/text.h"
#include "jobs.h"

namespace distrain {

using namespace scenario;

namespace {

/// Calls `tell` with each option whose default differs for text. The values are those of PyTorch's
/// word language model, which also divides the learning rate by 4 when the validation loss stalls.
void defaults_on_text(const auto& tell) {
  tell("vocab-size", &RnnOptions::vocab_size, 10000);
  tell("embedding-dim", &RnnOptions::emsize, 200);
  tell("nhid", &RnnOptions::nhid, 200);
  tell("nlayers", &RnnOptions::nlayers, 2);
  tell("bptt", &RnnOptions::bptt, 35);
  tell("dropout", &RnnOptions::dropout, 0.2);
  tell("batch-size", &RnnOptions::batch_size, 20);
  tell("lr", &RnnOptions::lr, 20);
  tell("lr-schedule", &RnnOptions::lr_schedule, "plateau:0,0.25,0,0");
  tell("clip", &RnnOptions::clip, 0.25);
}

void derive_rnn_defaults(RnnOptions& options, const std::function<bool(std::string_view)>& given) {
  if (options.data.empty()) return;
  defaults_on_text([&](const char* name, auto member, auto value) {
    if (!given(name)) options.*member = value;
  });
  if (options.valid_data.empty() && !given("lr-schedule")) options.lr_schedule = "constant";
}

/// Throws if options of the files are malformed or conflict.
void check_files(const RnnOptions& options, const job::Preflight& preflight) {
  if (!base::byte_count(options.in_memory)) {
    base::invalid("--in-memory " + options.in_memory +
                  ": not a number of bytes, such as 512, 256MB or 2GiB");
  }
  const bool bin = is_bin(options.data);
  for (const auto& [name, path] : {std::pair("--valid-data ", options.valid_data),
                                   std::pair("--test-data ", options.test_data)}) {
    if (path.empty() || is_bin(path) == bin) continue;
    base::invalid(name + path + ": must be " + (bin ? "a .bin file" : "a text") + ", as --data is");
  }
  if (bin && (preflight.local || preflight.has_rank_0) &&
      !preflight.options.decided("vocab-size")) {
    base::invalid("--data " + options.data +
                  ": a .bin file needs --vocab-size, the number of different tokens");
  }
}

/// Throws if this rank has data but rank 0 has none, because rank 0's model may not fit the data.
void check_rnn(const RnnOptions& options, const job::Preflight& preflight) {
  check_files(options, preflight);
  if (!preflight.of_rank_0 || !preflight.given("data")) return;
  const auto data = preflight.of_rank_0->find("data");
  if (data != preflight.of_rank_0->end() && !data->second.empty()) return;
  throw base::Exception(base::ErrorKind::kRendezvous,
                        "--data is given here but not to rank 0, which trains on random batches");
}

}  // namespace

void RnnOptions::describe(job::OptionList<RnnOptions>& list) {
  using Self = RnnOptions;
  list.without("min-trainers");  // trainers keep replicas, so the job cannot lose one
  list.choice("gradient-dtype", &Self::gradient_dtype, {"float32", "float16", "bfloat16"},
              kGradientDtypeHelp)
      .of_training();
  list.integer("vocab-size", &Self::vocab_size, "give the vocabulary at most N words")
      .range(2, job::kMaxInt)
      .may_change()  // a resume compares the vocabulary itself instead of its limit
      .details(R"(
It has the most frequent words, `<unk>` for others and `<eos>` for line ends. With a `.bin` file, N
must be given, and the words are the numbers from 0 to N - 1.)");
  list.integer("embedding-dim", &Self::emsize, "use embeddings of N numbers")
      .range(1, 1048576)
      .formerly("emsize");
  list.integer("nhid", &Self::nhid, "give the LSTM N hidden units").range(1, 1048576);
  list.integer("nlayers", &Self::nlayers, "stack N LSTM layers").range(1, 1024);
  list.real("dropout", &Self::dropout, "drop activations with probability X").below(0, 1);
  list.file("data", &Self::data, "train on the text in FILE, with words separated by blanks")
      .by_default("random batches with random labels");
  list.file("valid-data", &Self::valid_data, "evaluate on FILE after each epoch").needs("data");
  list.file("test-data", &Self::test_data, "evaluate on FILE at the end").needs("data");
  list.choice("token-type", &Self::token_type, {"uint16", "uint32"},
              "read tokens of this type from .bin files")
      .data_only()
      .details("The numbers are little-endian.");
  list.text("in-memory", &Self::in_memory, "SIZE",
            "read texts of fewer bytes into memory, and larger ones while training")
      .of_predict()
      .data_only()
      .details(R"(
SIZE is a number of bytes, such as 512, 256MB or 2GiB. The result does not depend on it. A text in
memory takes 4 bytes a word on each trainer. The first trainer reads a larger text once before the
training, counts its words and notes where they are; each trainer then reads only the words of its
own columns. That text must be a regular file that is not compressed and does not change. If it has
more than half a million different words, the count drops the rarer ones, which may then miss a few.)");
  list.group("Training");
  list.row("trainers").help("run N trainers; the job has N + 1 ranks").range(1, 1023);
  list.integer("batches-per-epoch", &Self::batches,
               "make N steps per epoch and trainer, on random batches")
      .range(1, job::kMaxInt)
      .formerly("batches")
      .random_only();
  list.integer("accumulate", &Self::accumulate, kAccumulateHelp).range(1, 1e6).of_training();
  list.integer("bptt", &Self::bptt, "use N words of each column per batch").range(1, job::kMaxInt);
  list.group("Sample");
  list.integer("generate", &Self::generate, "write N words at the end")
      .range(0, 1048576)
      .data_only()
      .of_predict();
  list.text("prompt", &Self::prompt, "TEXT", "begin the sample with TEXT")
      .needs("generate")
      .data_only()
      .may_change();
  RnnOptions on_text;
  defaults_on_text([&](auto, auto member, auto value) { on_text.*member = value; });
  const job::OptionMap text = list.write(on_text);
  defaults_on_text([&](const char* name, auto, auto) {
    list.row(name).by_default(text.at(name) + " with --data, otherwise " + list.find(name).initial);
  });
  list.row("data").details(R"(
The text may be compressed with gzip if it is read into memory (see --in-memory). A FILE whose name
ends in `.bin` has token numbers of the type --token-type, without a header, and is read while
training.)");
  list.row("data").details("A rank that is not given a path reads the file that rank 0 names.");
  for (const char* name : {"valid-data", "test-data"}) {
    list.row(name).details("Needs --data, and a FILE of the same kind.");
  }
  list.row("batch-size").help("use N columns of text per batch and trainer");
  list.row("bptt").details("Gradients are backpropagated through N words.");
  list.row("clip").details("The norm is that of the parameters of all ranks together.");
  list.row("generate").details("The words are in the `text` line.");
  list.row("prompt").details("Needs --generate. With a `.bin` file, TEXT has token numbers.");
}

const job::Definition<RnnOptions>& cmd::rnn_job() {
  static const auto kJob =
      job::define<RnnOptions>("rnn",
                              "train a language model: embeddings on a server, LSTM on trainers")
          .describe(
              R"(Trains a word language model. The embedding table and the decoder are on a
parameter server. The LSTM between them is on the trainers; several trainers
replicate it with DistributedDataParallel. Rank 0 is the server, and ranks 1 to
T are the trainers.)")
          .details(
              R"(Each step calls the server twice over RPC, and a distributed optimizer updates each parameter on
the rank that holds it. The ranks' roles are `ps`, `trainer1`, `trainer2`, ....

Without --data the job trains the tiny model of the PyTorch RPC tutorial on random batches. With
--data it trains a real language model, with other defaults.

`distrain predict CHECKPOINT [FILE]` prints the words that most likely follow each line of a text,
or with --generate N the next N words. `end` has the perplexity of the text. A model of a `.bin` file
reads lines of token numbers and does not evaluate them, or evaluates a `.bin` file.)")
          .example("distrain rnn", "Run the tutorial's job")
          .example(
              "distrain rnn --data train.txt --valid-data valid.txt --epochs 2 --mode sync "
              "--trainers 2",
              "Train with two trainers in step with each other")
          .example(
              "distrain rnn --data train.txt --generate 40 --prompt 'in the beginning' | jq -r "
              ".text//empty",
              "Write a few words in the style of the text")
          .example(
              "echo in the beginning | distrain predict saved - --generate 20 | jq -r .text//empty",
              "Continue a line with the newest checkpoint in the folder saved")
          .example("for r in 0 1; do distrain rnn --rank $r & done; wait",
                   "Start two ranks one by one")
          .events(job::trainer_events(/*may_lose=*/false, job::Unit::kWords))
          .event("text", "printed at the end of the job, with --generate",
                 {{"text", kText, "prompt and the words that follow it"}})
          .event("end", "",
                 {sometimes({"words_per_s", kNumber, "words per second of all trainers"})})
          .role("ps", 1, {}, Use::kCompute, "server")
          .role("trainer", &RnnOptions::trainers, train_rnn)
          .expose(expose_rnn)
          .local(train_rnn_local)
          .predict(predict_rnn, {sometimes({"words", kTexts, "most likely next words, best first"}),
                                 sometimes({"scores", kNumbers, "probabilities of the words"}),
                                 sometimes({"text", kText, "text that follows, with --generate"})})
          .derive_defaults(derive_rnn_defaults)
          .check(check_rnn);
  return kJob;
}

}  // namespace distrain
