#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <ATen/Functions.h>
#include <torch/nn/pimpl.h>

#include "distrain/autograd/parameter_versions.h"
#include "distrain/data/remote_stream.h"
#include "distrain/job/definition.h"
#include "distrain/rpc/to_device.h"

namespace distrain::scenario {

/// Options of `distrain hybrid`. The defaults are those of the PyTorch tutorial.
struct HybridOptions : job::TrainerOptions {
  HybridOptions() {
    epochs = 100;
    lr = 0.05;
  }
  static void describe(job::OptionList<HybridOptions>& list);

  int batches = 10;          ///< random batches per epoch and trainer
  int num_embeddings = 100;  ///< rows of the table; a file sets one per word
  int embedding_dim = 16;
  int classes = 8;   ///< number of classes; a file sets one per label
  std::string data;  ///< files in a data::Format, or kTeacher; empty: random batches
  std::string valid_data, test_data;  ///< files; empty: no evaluation
  std::string in_memory = "256MB";    ///< larger files are streamed
  std::string data_format = "auto";   ///< of streams: auto, fasttext or criteo
  std::vector<std::string> labels;    ///< of streams, in any order; empty: those of the data
  int64_t shuffle_buffer = 65536;     ///< see data::StreamOptions
  int64_t steps_per_epoch = 0;        ///< maximum, of streams; 0: no limit
  std::string bad_rows = "stop";      ///< or "skip", of streams
  std::string data_from = "auto";     ///< who reads streams: each trainer, rank0 for all, or auto
  std::string average_over = "data";  ///< or "trainers": see Plan::average_over_data
  std::string task = "classes";  ///< or "binary": two classes, of which one logit is the output
  std::vector<int64_t> dense;    ///< sizes of hidden layers after the embedding

  std::string table = "module";     ///< or "sharded": rows of the layer `table`
  int servers = 1;                  ///< ranks that hold the sharded table
  int hash_bits = 0;                ///< see data::TextVocabulary; 0: words are not hashed
  int64_t max_rows = 0;             ///< maximum number of rows on a server; 0: no limit
  int prefetch = 0;                 ///< batches that are looked up ahead of the current one
  std::string wire_dtype = "fp32";  ///< type of rows and gradients in messages: or bf16, fp16

  /// Value of `data` for random batches with labels from a hidden teacher.
  static constexpr const char* kTeacher = "teacher";
  bool has_teacher() const { return data == kTeacher; }
  bool has_text() const { return !data.empty() && !has_teacher(); }

  /// Returns the bound of the table's uniform initial values, or 0 for the tutorial's N(0, 1). With
  /// `data`, returns fastText's bound, so that the sum over the words of a long text stays small.
  double embedding_range() const { return data.empty() ? 0.0 : 1.0 / embedding_dim; }

  bool is_binary() const { return task == "binary"; }
  bool is_sharded() const { return table == "sharded"; }
  /// Returns true if the training data is read as a stream. Throws `bad_data` as expand_paths().
  bool streams() const;
  /// Returns true if rank 0 reads the streams for all trainers.
  bool reads_on_rank_0() const {
    return data_from == "rank0" ||
           (data_from == "auto" &&
            !data::can_divide(data::expand_paths(data::split_paths(data)), trainers));
  }
  /// Returns the format of the first file of `paths`, as --data-format says. Throws `invalid` if it
  /// needs --hash-bits.
  data::Format format_of(const std::vector<std::string>& paths) const;
  bool hashes_words() const { return has_text() && hash_bits > 0; }
  /// Returns the first option that only a sharded table has, as it is on the command line; empty if
  /// all of these options have their defaults.
  std::string sharded_option() const;
  /// Returns the mean loss of `scores` [n, outputs] for int64 `targets` [n]: cross-entropy, or log
  /// loss for the binary task. Returns 0 if n is 0.
  at::Tensor loss(const at::Tensor& scores, const at::Tensor& targets) const {
    if (targets.numel() == 0) return scores.sum();  // 0, where a mean would be NaN
    if (!is_binary()) return at::cross_entropy_loss(scores, targets);
    return at::binary_cross_entropy_with_logits(scores.flatten(), targets.to(scores.dtype()));
  }
};

/// Random batches as in PyTorch's tutorial on combining DDP with RPC.
struct RandomBags {
  uint64_t seed = 1;
  int64_t num_embeddings = 100;
  int64_t classes = 8;
  bool has_teacher = false;  ///< if true, the hidden teacher sets the targets; else random

  /// Returns 20 to 50 indices in bags of 1 to 10, and a target per bag, the same in each call.
  data::Batch batch(int trainer, int64_t epoch, int64_t step) const;
  /// Returns the label that the hidden teacher gives to `bag`. The teacher draws a class and a
  /// weight for each index; the label is the class with the largest total weight. A sum of
  /// embeddings and a linear layer can represent the teacher if an embedding has at least as many
  /// numbers as there are classes.
  int64_t taught(std::span<const int64_t> bag) const;
};

/// The job's batches: random, with random or a teacher's labels, from a file in memory, or streams.
class HybridData {
 public:
  using Words = std::shared_ptr<const data::TextVocabulary>;
  /// Facts of streamed data, which trainer 0 sends to all trainers.
  struct Common {
    Words words;
    data::Format format = data::Format::kFastText;
    uint64_t content_key = 0;                    ///< if rank 0 reads the streams; otherwise 0
    std::shared_ptr<data::StreamServer> server;  ///< the same; null on other trainers
    static constexpr auto kFields =
        std::tuple(&Common::words, &Common::format, &Common::content_key);
  };
  /// The trainers' access to facts and batches. The default is for trainers that are all here.
  struct Sharing {
    /// Returns what `make` returns on trainer 0, also if it has no streams: then without words.
    std::function<Common(const std::function<Common()>& make)> common;
    /// Returns the function by which `trainer` takes batches from trainer 0's server.
    std::function<data::RemoteStream::Take(int trainer)> take;
  };
  /// Opens the files for `trainers`, which are those of this process, and reads those that are not
  /// streams. Throws `bad_data` if a file cannot be read or is not valid.
  HybridData(const HybridOptions& options, const std::vector<int>& trainers,
             const Sharing& sharing = Sharing());
  /// Reads test examples, using the vocabulary of a checkpoint. The examples need no labels.
  HybridData(const HybridOptions& options, const job::Snapshot& snapshot,
             const std::string& examples);

  ~HybridData() {
    if (server_) server_->stop();  // requests that were made ahead may wait for a pipe
  }

  /// Returns the number of rows of the embedding table.
  int64_t rows() const { return words_ ? words_->num_words() : options_.num_embeddings; }
  int64_t classes() const { return words_ ? std::ssize(words_->labels) : options_.classes; }
  /// Returns the number of outputs of the net.
  int64_t outputs() const { return options_.is_binary() ? 1 : classes(); }
  /// Adds to `training` the vocabulary for predict and the data properties that all trainers share.
  void agree(job::TrainingPlan& training) const;
  job::Plan plan() const;
  /// Has `training` read the streams, if there are any.
  void read_in(job::TrainingPlan& training) {
    if (open_shard_) training.read(open_shard_);
    for (auto& [trainer, stream] : served_) training.read(*stream, trainer);
  }
  data::Batch batch(const job::Step& step);

  /// Has `training` evaluate the validation data after each epoch and the test data at the end.
  /// `forward` returns the scores of a batch. This object must outlive the training.
  void evaluate_in(job::TrainingPlan& training,
                   const std::function<at::Tensor(const data::Batch&)>& forward) const;
  /// Returns true if words of the evaluated files may be unknown.
  bool evaluates_text() const { return words_ && words_->hash_bits == 0 && (valid_ || test_); }
  /// Returns how many words of the validation and test data are not in the training data.
  int64_t unknown_words() const {
    return (valid_ ? valid_->dropped_tokens : 0) + (test_ ? test_->dropped_tokens : 0);
  }
  /// Returns the test examples. Call it only if there are test examples.
  const data::TextDataset& test() const { return *test_; }
  /// Calls `use` with each batch of the examples in `set` that belong to `share`.
  static void each_batch(const data::TextDataset& set, const job::Share& share,
                         const std::function<void(const data::Batch&)>& use) {
    constexpr int64_t kBatch = 256;
    share.each_batch(set.size(), kBatch, [&](std::span<const int64_t> examples) {
      use(data::make_batch(set, examples));
    });
  }
  /// Returns the labels of the classes. Call it only if the data come from a file.
  const std::vector<std::string>& labels() const { return words_->labels; }

 private:
  void open_streams(const std::vector<int>& trainers, const Sharing& sharing);
  Words words_of(const data::StreamOptions& stream) const;
  data::TextDataset read(const std::string& path, data::Labels labels = data::Labels::kAll) const {
    return data::read_examples(path, format_, words_, labels);
  }

  const HybridOptions options_;
  const RandomBags bags_{options_.seed, options_.num_embeddings, options_.classes,
                         options_.has_teacher()};
  Words words_;                              // null without a file
  job::TrainingPlan::OpenShard open_shard_;  // set if each trainer reads its own stream
  // Streams by trainer, if rank 0 reads the data.
  std::map<int, std::unique_ptr<data::Source>> served_;
  uint64_t content_key_ = 0;                    // of the streams
  std::shared_ptr<data::StreamServer> server_;  // on trainer 0
  data::Format format_ = data::Format::kFastText;
  std::optional<data::TextDataset> train_, valid_, test_;
  std::optional<data::Sampler> sampler_;  // chooses examples from `train_`
};

/// The parameter server's module: the sum of the rows of a bag's words (EmbeddingBag, mode sum).
/// Its gradient is sparse: only the rows that were looked up travel and change.
class EmbeddingTable {
 public:
  /// If `range` is 0, draws rows from N(0, 1), as torch.nn.EmbeddingBag; else uniformly in ±range.
  using Constructor = EmbeddingTable(int64_t rows, int64_t dim, double range, uint64_t seed,
                                     std::string device);
  EmbeddingTable(int64_t rows, int64_t dim, double range, uint64_t seed, const std::string& device);

  /// Maps int64 `indices` [n] and `offsets` [bags] to float [bags, dim].
  at::Tensor forward(rpc::CallContext& call, at::Tensor indices, at::Tensor offsets) {
    const autograd::ParameterRead no_row_changes_meanwhile(call.agent);
    return rpc::for_rank(call.agent, call.caller.rank, lookup(indices, offsets));
  }
  at::Tensor lookup(const at::Tensor& indices, const at::Tensor& offsets) const;
  std::vector<at::Tensor> parameters() { return {weight_}; }
  rpc::NamedTensors named_parameters() const { return {{"embedding.weight", weight_}}; }

 private:
  at::Tensor weight_;
};

/// The trainers' module: torch.nn.Linear with initial values that depend only on the seed, after
/// hidden layers with ReLU.
class DenseImpl : public torch::nn::Module {
 public:
  DenseImpl(int64_t inputs, int64_t outputs, uint64_t seed, c10::Device device,
            const std::vector<int64_t>& hidden = {});
  /// Maps [n, inputs] to [n, outputs].
  at::Tensor forward(at::Tensor x) const {
    for (const auto& layer : hidden_) x = at::relu(layer->forward(x));
    return at::linear(x, weight, bias);
  }
  /// Returns the names of the parameters, in the order of parameters(), with "fc." before each.
  std::vector<std::string> names() const {
    std::vector<std::string> names;
    for (const auto& parameter : named_parameters()) names.push_back("fc." + parameter.key());
    return names;
  }

  at::Tensor weight;
  at::Tensor bias;

 private:
  std::vector<std::shared_ptr<DenseImpl>> hidden_;
};
TORCH_MODULE(Dense);

void train_hybrid(job::Rank& rank, const HybridOptions& options);
void expose_hybrid(rpc::Agent& agent);
/// Trains in one process without RPC: the reference for correctness and speed.
void train_hybrid_local(job::SingleProcess& local, const HybridOptions& options);
/// Labels examples with the model of a checkpoint.
void predict_hybrid(job::Predictions& predictions, const HybridOptions& options);

}  // namespace distrain::scenario
