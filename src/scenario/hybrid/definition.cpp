// distrain hybrid: its options and ranks.

#include "distrain/models/embedding_table.h"
#include "distrain/scenario/hybrid.h"

namespace distrain::scenario {

HybridOptions::HybridOptions() {
  epochs = 100;
  lr = 0.05;
}

void HybridOptions::describe(job::OptionList<HybridOptions>& list) {
  list.without("min-trainers");  // they keep replicas
  list.integer("num-embeddings", &HybridOptions::num_embeddings,
               "rows of the embedding table (with a file: its words)")
      .range(1, job::kMaxInt)
      .random_only();
  list.integer("embedding-dim", &HybridOptions::embedding_dim, "numbers in a row")
      .range(1, 1048576);
  list.integer("classes", &HybridOptions::classes, "classes (with a file: its labels)")
      .range(1, 1048576)
      .random_only();
  list.file("data", &HybridOptions::data,
            "train on text: '__label__X word word ...', one example a line; teacher: on random "
            "batches whose labels a hidden teacher makes from the words")
      .or_word(HybridOptions::kTeacher)
      .by_default("random batches with random labels")
      .details(
          "In a file, an example has its label and words separated by blanks, as in fastText.\n"
          "Random labels are the tutorial's: nothing can be learned, and the loss stays near the\n"
          "logarithm of --classes. The labels of `teacher` can be learned: the teacher follows "
          "from\n"
          "--seed, and 1,000 other examples are evaluated after each epoch. A file that is called\n"
          "teacher is ./teacher.");
  list.file("valid-data", &HybridOptions::valid_data, "evaluate on this file after each epoch")
      .needs("data");
  list.file("test-data", &HybridOptions::test_data, "evaluate on this file at the end")
      .needs("data");
  list.group("Training");
  list.integer("batches-per-epoch", &HybridOptions::batches,
               "of each trainer, not with a file in --data")
      .range(1, job::kMaxInt)
      .formerly("batches")
      .random_only();
  list.row("batch-size").help("examples a batch and trainer, with a file in --data").data_only();
}

const job::Definition<HybridOptions>& hybrid_job() {
  using Use = cuda::DeviceRole::Use;
  using enum job::FieldType;
  using job::sometimes;
  static const auto kJob =
      job::define<HybridOptions>(
          "hybrid", "embeddings on a parameter server, dense layers under DDP on trainers")
          .describe(
              R"(Trains a text classifier: an EmbeddingBag held by a parameter server, which the trainers
look up over RPC, and a Linear layer that they share by DistributedDataParallel. Ranks
0 to T-1 are the trainers, T is the master, T+1 the parameter server.)")
          .details(
              R"(The table is on the parameter server; a trainer sends the gradient of what it looked up back.
`trainer0`, `trainer1`, ..., `master` and `ps` are the ranks' roles. Only the trainers read the
data, and each may be given a path of its own.

`distrain predict CHECKPOINT [FILE]` gives the labels of examples, which are written as those of
--data, with a label or without. Words that were not there in training do not count.)")
          .example("distrain hybrid --data teacher",
                   "Learn labels that a hidden teacher makes, without any file")
          .example("distrain hybrid", "The tutorial's job: random labels, so nothing is learned")
          .example("distrain hybrid --epochs 20 --mode sync",
                   "The trainers in step with each other")
          .example(
              "distrain hybrid --data r8.train --test-data r8.test --optimizer adagrad "
              "--epochs 15",
              "Text")
          .example("distrain predict saved r8.test | jq -r .label//empty",
                   "What the newest checkpoint in the folder saved makes of a text")
          .example("for r in 0 1 2 3; do distrain hybrid --rank $r & done; wait",
                   "Four ranks that are started one by one")
          .example("distrain hybrid --ranks 0-1 --master-addr node0",
                   "The first two ranks, on the machine node0; --ranks 2-3 on another one starts "
                   "the others")
          .event("end", "",
                 {sometimes({"unknown_words", kInteger,
                             "words that were evaluated and are not in the training data: they do "
                             "not count"})})
          .role("trainer", &HybridOptions::trainers, train_hybrid)
          .role("master", 1, {}, Use::kNone)
          .role("ps", 1, {}, Use::kCompute, "server")
          .expose<models::EmbeddingTable>("EmbeddingTable")
          .expose(expose_hybrid)
          .local(train_hybrid_local)
          .predict(predict_hybrid);
  return kJob;
}

}  // namespace distrain::scenario
