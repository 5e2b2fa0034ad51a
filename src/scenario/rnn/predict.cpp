// distrain predict, of a checkpoint of rnn: what may follow lines of text.

#include <algorithm>

#include <ATen/Functions.h>

#include "data.h"
#include "language_model.h"
#include "rnn.h"

namespace distrain::scenario {

namespace {

constexpr int64_t kLikeliest = 5;

job::Json likeliest(const at::Tensor& chances, const data::Vocabulary& vocabulary) {
  const auto [scores, words] = chances.topk(std::min(kLikeliest, chances.size(0)));
  job::Json fields{{"words", job::Json::array()}, {"scores", job::Json::array()}};
  for (int64_t i = 0; i < words.size(0); ++i) {
    fields["words"].push_back(std::string(vocabulary.word(words[i].item<int64_t>())));
    fields["scores"].push_back(scores[i].item<double>());
  }
  return fields;
}

}  // namespace

void predict_rnn(job::Predictions& predictions, const RnnOptions& options) {
  const RnnData data(options, predictions.snapshot(), predictions.input());
  const WholeModel whole(options, data.words(), predictions.device());
  predictions.load(whole.named());
  const LanguageModel model(options, whole.lstm, whole.ends());
  for (const std::vector<int64_t>& line : data.valid_lines()) {
    predictions.tell(options.generate > 0
                         ? job::Json{{"text", model.continued("", line, data.vocabulary())}}
                         : likeliest(model.next(line), data.vocabulary()));
  }
  // In the shares of the trainers, as they evaluated it: sums depend on that.
  job::Evaluation evaluation;
  for (int trainer = 0; trainer < options.trainers; ++trainer) {
    evaluation.add(model.evaluate(data, {trainer, options.trainers}));
  }
  predictions.evaluated(evaluation, job::Unit::kWords);
}

}  // namespace distrain::scenario
