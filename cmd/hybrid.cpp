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
  list.file("data", &Self::data,
            "train on lines of '__label__X word word ...'; teacher makes learnable random batches")
      .or_word(HybridOptions::kTeacher)
      .by_default("random batches with random labels")
      .details(R"(
The format of a file is fastText's: each line has a label and words separated by blanks. With `teacher`,
batches are random, and a hidden teacher derived from --seed makes their labels; 1,000 other examples
are evaluated after each epoch. Random labels are those of the PyTorch tutorial: nothing can be
learned, and the loss stays near the logarithm of --classes. Use ./teacher for a file of that name.)");
  list.file("valid-data", &Self::valid_data, "evaluate on FILE after each epoch").needs("data");
  list.file("test-data", &Self::test_data, "evaluate on FILE at the end").needs("data");
  list.group("Training");
  list.integer("batches-per-epoch", &Self::batches, "use N generated batches per epoch and trainer")
      .range(1, job::kMaxInt)
      .formerly("batches")
      .random_only();
  list.row("batch-size").help("use N examples per trainer and batch, with a file").data_only();
}

const job::Definition<HybridOptions>& cmd::hybrid_job() {
  static const auto kJob =
      job::define<HybridOptions>("hybrid",
                                 "train embeddings on a parameter server, dense layers under DDP")
          .describe(
              R"(Trains a text classifier. Its EmbeddingBag is on a parameter server, and
trainers look up rows over RPC. Its Linear layer is replicated on the trainers
with DistributedDataParallel. Ranks 0 to T-1 are the trainers, rank T is the
master, and rank T+1 is the parameter server.)")
          .details(
              R"(Distributed autograd sends the gradients of the rows back to the server. The ranks' roles are
`trainer0`, `trainer1`, ..., `master` and `ps`. Only the trainers read the data, and each trainer
may be given its own path.

`distrain predict CHECKPOINT [FILE]` prints the labels of examples in the format of --data, with or
without a label. Words that are not in the training data are ignored.)")
          .example("distrain hybrid --data teacher", "Learn the labels of a hidden teacher")
          .example("distrain hybrid", "Run the tutorial's job; nothing can be learned")
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
          .check([](const HybridOptions& options, const job::Preflight& preflight) {
            if (preflight.has_rank_0 && options.is_binary() && !options.has_text() &&
                options.classes != 2) {
              base::invalid("--task binary predicts two classes: give --classes 2");
            }
          })
          .event("end", "",
                 {sometimes(
                     {"unknown_words", kInteger,
                      "evaluated words that are ignored because the training data lacks them"})})
          .role("trainer", &HybridOptions::trainers, train_hybrid)
          .role("master", 1, {}, Use::kNone)
          .role("ps", 1, {}, Use::kCompute, "server")
          .expose<EmbeddingTable>("EmbeddingTable")
          .expose(expose_hybrid)
          .local(train_hybrid_local)
          .predict(predict_hybrid);
  return kJob;
}

}  // namespace distrain
