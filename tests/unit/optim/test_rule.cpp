#include <string>
#include <variant>

#include "distrain/base/error.h"
#include "distrain/optim/update_rule.h"
#include "support/catch.h"
#include "support/cluster.h"

namespace distrain::optim {

using base::ErrorKind;
using testing::error_of;

TEST_CASE("A rule is created from command-line options") {
  const Rule plain = make_rule({});
  CHECK(std::get<Sgd>(plain.options).lr == 0.01);
  CHECK(plain.schedule == LearningRateSchedule());
  CHECK(plain.max_norm == 0);
  const Rule rule = make_rule({"rmsprop", 0.5, 0.9, 0.1, "warmup:5+cosine:10", 0.25});
  const auto rmsprop = std::get<RmsProp>(rule.options);
  CHECK(rmsprop.lr == 0.5);
  CHECK(rmsprop.momentum == 0.9);
  CHECK(rmsprop.weight_decay == 0.1);
  CHECK(rule.schedule == LearningRateSchedule(Cosine{10}, {5}));
  CHECK(rule.max_norm == 0.25);
  CHECK(std::get<AdamW>(make_rule({"adamw", 0.1}).options).weight_decay == 0.01);
  CHECK(std::get<AdamW>(make_rule({"adamw", 0.1, 0, 0}).options).weight_decay == 0);

  const auto message = [](const RuleText& text) {
    const base::Error error = error_of([&] { make_rule(text); });
    CHECK(error.kind == ErrorKind::kInvalid);
    return error.message;
  };
  CHECK(message({"adam", 0.1, 0.9}) == "adam has no option 'momentum'");
  CHECK(message({"lamb"}) ==
        "no optimizer 'lamb': sgd, adagrad, adam, adamw, rmsprop, adadelta, adamax, rprop");
  CHECK(message({"sgd", -1}) == "sgd: lr cannot be -1.000000");
  CHECK(message({"sgd", 1, 0, 0, "step"}) == "--lr-schedule step: it wants a size");
  CHECK(message({"sgd", 1, 0, 0, "constant", -1}) ==
        "gradients cannot be clipped to a norm of -1.000000");
}

}  // namespace distrain::optim
