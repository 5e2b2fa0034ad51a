#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "distrain/base/trace.h"
#include "distrain/data/tokens.h"
#include "distrain/job/definition.h"
#include "lstm.h"

namespace distrain::scenario {

/// Options of `distrain rnn`. The defaults are those of the PyTorch RPC tutorial, for random
/// batches. With `data`, the command line uses the defaults of PyTorch's word language model.
struct RnnOptions : job::TrainerOptions {
  RnnOptions() {
    trainers = 1;
    epochs = 10;
    batch_size = 5;
    lr = 0.05;
  }
  static void describe(job::OptionList<RnnOptions>& list);

  int batches = 5;      ///< per epoch; random data only
  int bptt = 10;        ///< number of words that a batch has of each text column
  int vocab_size = 10;  ///< including `<unk>` and `<eos>`
  int emsize = 2;
  int nhid = 3;
  int nlayers = 4;
  double dropout = 0.5;
  std::string data;                   ///< text or `.bin` file; empty: random batches
  std::string valid_data, test_data;  ///< files of the same kind; empty: no such evaluation
  std::string token_type = "uint16";  ///< of `.bin` files; or uint32
  std::string in_memory = "256MB";    ///< for base::byte_count(): limit for a text in memory
  int generate = 0;                   ///< number of words of the final sample
  std::string prompt;
};

using WordBatch = data::TokenColumns::Batch;

/// Returns true if `path` is a file of token numbers rather than a text.
inline bool is_bin(const std::string& path) { return path.ends_with(".bin"); }

/// Facts about the files that take a pass over them. Trainer 0 finds them for all trainers.
struct RnnScan {
  std::vector<std::string> words;       ///< the vocabulary
  data::TokenIndex train, valid, test;  ///< empty for a text that is read into memory
  static constexpr auto kFields =
      std::tuple(&RnnScan::words, &RnnScan::train, &RnnScan::valid, &RnnScan::test);
};
/// Throws `bad_data` if a file cannot be read or is not valid.
RnnScan scan_files(const RnnOptions& options);

/// The text of the job, cut into T · step_size() columns (see TokenColumns) for T trainers. Trainer
/// t reads its own step_size() columns side by side, from column t · step_size() on. A part of a
/// step (`--accumulate`) has batch_size of them. Without a file, the words are random.
class RnnData {
 public:
  /// Opens or reads the files. Throws `bad_data` if a file cannot be read or is not valid.
  RnnData(const RnnOptions& options, const RnnScan& scan);
  RnnData(const RnnData&) = delete;
  /// Reads a file for evaluation, using the vocabulary of a checkpoint.
  RnnData(const RnnOptions& options, const job::Snapshot& snapshot, const std::string& text);

  job::Plan plan() const;
  /// Adds to `training` the vocabulary for predict and the data properties that all trainers share.
  void agree(job::TrainingPlan& training) const;
  /// Returns the size of the vocabulary.
  int64_t words() const { return vocabulary_ ? vocabulary_->size() : options_.vocab_size; }
  WordBatch batch(const job::Step& step, const job::Share& part) const {
    const base::TraceScope scope("data");
    return columns_of(step.shard, part.index).batch(step.number, options_.bptt);
  }

  /// Return the texts to evaluate after each epoch (valid) and at the end (test).
  const data::Tokens& valid() const { return *valid_; }
  const data::Tokens& test() const { return *test_; }

  /// Returns the vocabulary. Call it only if the text comes from a file.
  const data::Vocabulary& vocabulary() const { return *vocabulary_; }

 private:
  data::TokensPtr read(const std::string& path, const data::TokenIndex& index) const;
  data::TokenColumns columns_of(int trainer, int part) const {
    const int64_t own = options_.step_size(), of_part = options_.batch_size;
    return {*train_, own * options_.trainers, own * trainer + of_part * part, of_part};
  }

  const RnnOptions options_;
  std::optional<data::Vocabulary> vocabulary_;
  data::TokensPtr train_, valid_, test_;
};

/// A language model: an LSTM in this process, and an embedding and a decoder that may be remote.
class LanguageModel {
 public:
  /// The embedding and the decoder, called over RPC or directly.
  struct Ends {
    std::function<at::Tensor(const at::Tensor& words)> embed;
    std::function<at::Tensor(const at::Tensor& hidden, const at::Tensor& targets)> loss;
    std::function<at::Tensor(const at::Tensor& hidden)> scores;
  };

  /// If `group` is given, its trainers replicate the LSTM by DistributedDataParallel.
  LanguageModel(const RnnOptions& options, c10::Device device, Ends ends,
                const job::Group* group = nullptr)
      : options_(options),
        lstm_(options.emsize, options.nhid, options.nlayers, options.dropout, options.seed, device),
        ends_(std::move(ends)) {
    if (group) parallel_.emplace(lstm_, *group, options.replicas());
  }

  /// Returns a batch's part of the step's loss. Updates the state of its columns for the next step.
  at::Tensor training_loss(const WordBatch& batch, const job::Step& step, const job::Share& part,
                           LstmState& state);
  /// See DistributedDataParallel::no_sync(). Does nothing if there is one trainer.
  std::shared_ptr<void> no_sync(bool is_active) {
    return parallel_ ? parallel_->no_sync(is_active) : nullptr;
  }
  /// Makes `training` evaluate the texts of `data`. `data` and this object must outlive `training`.
  void evaluate_in(job::TrainingPlan& training, const RnnData& data) const {
    training.evaluate_epochs([&](const auto& share) { return evaluate(data.valid(), share); });
    training.evaluate_at_end([&](const auto& share) { return evaluate(data.test(), share); });
  }
  /// Evaluates a share of `text`, from a zero LSTM state on. The caller disables gradients.
  job::Evaluation evaluate(const data::Tokens& text, const job::Share& share) const;
  /// Prints the `text` line if --generate is given and there is a vocabulary.
  void tell_sample(const RnnData& data, job::EventSink& sink) const {
    if (options_.generate == 0 || options_.data.empty()) return;
    const data::Vocabulary& vocabulary = data.vocabulary();
    const std::vector<int64_t> words = data::to_tokens(options_.prompt, vocabulary);
    sink.emit("text", {{"text", continued(options_.prompt, words, vocabulary)}});
  }

  /// Returns the probability of each word of the vocabulary to follow `words`. Updates `state`.
  at::Tensor next(const std::vector<int64_t>& words, LstmState& state) const {
    const at::NoGradGuard no_grad;
    const at::Tensor last = hidden_of(at::tensor(words, at::kLong).view({-1, 1}), state)[-1];
    return rpc::to_device(at::softmax(ends_.scores(last)[0], 0), c10::kCPU);
  }
  /// Returns `text`, whose tokens are `words`, and `--generate` more words, sampled by probability.
  std::string continued(std::string text, std::vector<int64_t> words,
                        const data::Vocabulary& vocabulary) const;

  const LstmImpl& lstm() const { return *lstm_; }
  rpc::NamedTensors lstm_parameters() const { return store::named_tensors("rnn", *lstm_); }

 private:
  /// Computes the hidden states without dropout.
  at::Tensor hidden_of(const at::Tensor& words, LstmState& state) const {
    nn::Dropout none;
    return lstm_->forward(ends_.embed(words), state, none);
  }

  const RnnOptions options_;
  mutable Lstm lstm_;
  const Ends ends_;
  std::optional<ddp::DistributedDataParallel<Lstm>> parallel_;
};

void train_rnn(job::Rank& rank, const RnnOptions& options);
void expose_rnn(rpc::Agent& agent);
/// Trains in one process without RPC: the reference for correctness and speed.
void train_rnn_local(job::SingleProcess& local, const RnnOptions& options);
/// Predicts the words that follow lines of text, with the model of a checkpoint.
void predict_rnn(job::Predictions& predictions, const RnnOptions& options);

}  // namespace distrain::scenario
