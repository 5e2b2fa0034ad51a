// distrain rnn: its options and ranks.

#include "distrain/base/error.h"
#include "distrain/scenario/rnn.h"

namespace distrain::scenario {

namespace {

/// The defaults that are others on a text: those of PyTorch's word language model, where a learning
/// rate is divided by 4 as soon as the validation gets no better.
template <class Tell>
void defaults_on_text(const Tell& tell) {
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

void settle(RnnOptions& options, const std::function<bool(std::string_view)>& given) {
  if (options.data.empty()) return;
  defaults_on_text([&](const char* name, auto member, auto value) {
    if (!given(name)) options.*member = value;
  });
  if (options.valid_data.empty() && !given("lr-schedule")) options.lr_schedule = "constant";
}

/// The model's size follows from whether rank 0 has data.
void check(const RnnOptions&, const job::Preflight& preflight) {
  if (!preflight.of_rank_0 || !preflight.given("data")) return;
  const auto data = preflight.of_rank_0->find("data");
  if (data != preflight.of_rank_0->end() && !data->second.empty()) return;
  throw base::Exception(base::ErrorKind::kRendezvous,
                        "--data is given here, but not to rank 0, which trains on random batches");
}

}  // namespace

RnnOptions::RnnOptions() {
  trainers = 1;
  epochs = 10;
  batch_size = 5;
  lr = 0.05;
}

void RnnOptions::describe(job::OptionList<RnnOptions>& list) {
  list.without("min-trainers");  // they keep replicas
  list.integer("vocab-size", &RnnOptions::vocab_size, "words that are told apart, at most")
      .range(2, job::kMaxInt)
      .may_change()  // it is the words themselves that have to be as many
      .details("The most frequent ones; `<unk>` is all others, `<eos>` the end of a line.");
  list.integer("embedding-dim", &RnnOptions::emsize, "numbers in a word's embedding")
      .range(1, 1048576)
      .formerly("emsize");
  list.integer("nhid", &RnnOptions::nhid, "numbers in the LSTM's hidden state").range(1, 1048576);
  list.integer("nlayers", &RnnOptions::nlayers, "layers of the LSTM").range(1, 1024);
  list.real("dropout", &RnnOptions::dropout, "share of numbers set to 0 in training").below(0, 1);
  list.file("data", &RnnOptions::data, "train on this text, words between blanks")
      .by_default("random batches");
  list.file("valid-data", &RnnOptions::valid_data, "evaluate on this text after each epoch")
      .needs("data");
  list.file("test-data", &RnnOptions::test_data, "evaluate on this text at the end").needs("data");
  list.group("Training");
  list.row("trainers").help("trainers; the job has one rank more").range(1, 1023);
  list.integer("batches-per-epoch", &RnnOptions::batches, "of each trainer, random data only")
      .range(1, job::kMaxInt)
      .formerly("batches")
      .random_only();
  list.integer("bptt", &RnnOptions::bptt, "words a batch and column").range(1, job::kMaxInt);
  list.group("Sample");
  list.integer("generate", &RnnOptions::generate, "words to write at the end")
      .range(0, 1048576)
      .data_only()
      .of_predict();
  list.text("prompt", &RnnOptions::prompt, "TEXT", "words that the sample begins with")
      .needs("generate")
      .data_only()
      .may_change();
  RnnOptions on_text;
  defaults_on_text([&](auto, auto member, auto value) { on_text.*member = value; });
  const job::OptionMap words = list.write(on_text);
  defaults_on_text([&](const char* name, auto, auto) {
    list.row(name).by_default(words.at(name) + " with --data, else " + list.find(name).initial);
  });
  list.row("data").details(
      "Each rank may be given a path of its own; one that is given none reads what "
      "rank 0 names.");
  for (const char* name : {"valid-data", "test-data"}) list.row(name).details("Needs --data.");
  list.row("batch-size")
      .help("columns of text a trainer")
      .details("A trainer reads them side by side.");
  list.row("bptt").details("So far the gradients go back.");
  list.row("clip").details("The norm is over the parameters of all ranks together.");
  list.row("generate").details("They come as a `text` line.");
  list.row("prompt").details("Needs --generate.");
}

const job::Definition<RnnOptions>& rnn_job() {
  using Use = cuda::DeviceRole::Use;
  using enum job::FieldType;
  using job::sometimes;
  static const auto kJob =
      job::define<RnnOptions>(
          "rnn", "a language model: embedding and decoder on a server, LSTM on trainers")
          .describe(
              R"(Trains a word language model whose embedding table and decoder a parameter server holds,
while the LSTM between them is the trainers', who share it by DistributedDataParallel
when there are several. Rank 0 is the server, ranks 1 to T are the trainers.)")
          .details(
              R"(Each step goes to the server twice over RPC, and a distributed optimizer updates the parameters
where they are. `ps`, `trainer1`, `trainer2`, ... are the ranks' roles.

Without --data it is a tiny model on random batches, that of the PyTorch RPC tutorial; with it, a
language model of use. Most defaults differ between the two.

`distrain predict CHECKPOINT [FILE]` gives the words that are likeliest to follow each line of a
text, or with --generate so many words, and in `end` the perplexity of the whole text.)")
          .example("distrain rnn", "The tutorial's job")
          .example(
              "distrain rnn --data train.txt --valid-data valid.txt --epochs 2 --mode sync "
              "--trainers 2",
              "Two trainers, in step with each other")
          .example(
              "distrain rnn --data train.txt --generate 40 --prompt 'in the beginning' | jq -r "
              ".text//empty",
              "A few words in the way of the text")
          .example(
              "echo in the beginning | distrain predict saved - --generate 20 | jq -r .text//empty",
              "What the newest checkpoint in the folder saved writes after a line")
          .example("for r in 0 1; do distrain rnn --rank $r & done; wait",
                   "Two ranks that are started one by one")
          .events(job::trainer_events(/*may_lose=*/false, job::Unit::kWords))
          .event("text", "at the end, with --generate",
                 {{"text", kText, "the prompt and what follows it"}})
          .event("end", "",
                 {sometimes({"words_per_s", kNumber, "words a second of the first trainer"})})
          .role("ps", 1, {}, Use::kCompute, "server")
          .role("trainer", &RnnOptions::trainers, train_rnn)
          .expose(expose_rnn)
          .local(train_rnn_local)
          .predict(predict_rnn,
                   {sometimes({"words", kTexts, "the likeliest next words, the first one most"}),
                    sometimes({"scores", kNumbers, "their probabilities"}),
                    sometimes({"text", kText, "what follows, with --generate"})})
          .settle(settle)
          .check(check);
  return kJob;
}

}  // namespace distrain::scenario
