#include <limits>
#include <string>

#include "distrain/optim/update_rule.h"
#include "distrain/rpc/serialize.h"
#include "invalid_message.h"
#include "support/catch.h"

namespace distrain::optim {
static_assert(rpc::Serializable<OptimizerFields>);

TEST_CASE("Options survive the conversion to plain fields") {
  const OptimizerOptions options =
      GENERATE(OptimizerOptions(Sgd{0.1, 0.9, 0.01, 0, true}), OptimizerOptions(Sgd{}),
               OptimizerOptions(Adagrad{0.1, 0.2, 0.3, 0.4, 0.5}), OptimizerOptions(Adagrad{}),
               OptimizerOptions(Adam{0.1, 0.2, 0.3, 0.4, 0.5, true}), OptimizerOptions(Adam{}),
               OptimizerOptions(AdamW{0.1, 0.2, 0.3, 0.4, 0.5, true}), OptimizerOptions(AdamW{}),
               OptimizerOptions(RmsProp{0.1, 0.2, 0.3, 0.4, 0.5, true}),
               OptimizerOptions(RmsProp{}), OptimizerOptions(Adadelta{0.1, 0.2, 0.3, 0.4}),
               OptimizerOptions(Adamax{0.1, 0.2, 0.3, 0.4, 0.5}),
               OptimizerOptions(Rprop{0.1, 0.2, 1.3, 0.4, 0.5}));
  const OptimizerFields fields = to_fields(options);
  const OptimizerOptions back = from_fields(fields);
  CHECK(back.index() == options.index());
  CHECK(to_fields(back).name == fields.name);
  CHECK(to_fields(back).values == fields.values);
}

TEST_CASE("Every option has its own field") {
  const auto adam = std::get<Adam>(from_fields({"adam",
                                                {{"lr", 0.1},
                                                 {"beta1", 0.2},
                                                 {"beta2", 0.3},
                                                 {"eps", 0.4},
                                                 {"weight_decay", 0.5},
                                                 {"amsgrad", 1}}}));
  CHECK(adam.lr == 0.1);
  CHECK(adam.beta1 == 0.2);
  CHECK(adam.beta2 == 0.3);
  CHECK(adam.eps == 0.4);
  CHECK(adam.weight_decay == 0.5);
  CHECK(adam.amsgrad);
  const auto adamw = std::get<AdamW>(from_fields({"adamw", {{"weight_decay", 0.5}}}));
  CHECK(adamw.weight_decay == 0.5);
  const auto rmsprop = std::get<RmsProp>(from_fields({"rmsprop",
                                                      {{"lr", 0.1},
                                                       {"alpha", 0.2},
                                                       {"eps", 0.3},
                                                       {"weight_decay", 0.4},
                                                       {"momentum", 0.5},
                                                       {"centered", 1}}}));
  CHECK(rmsprop.lr == 0.1);
  CHECK(rmsprop.alpha == 0.2);
  CHECK(rmsprop.eps == 0.3);
  CHECK(rmsprop.weight_decay == 0.4);
  CHECK(rmsprop.momentum == 0.5);
  CHECK(rmsprop.centered);
}

TEST_CASE("Missing fields have their default") {
  const auto adagrad = std::get<Adagrad>(from_fields({"adagrad", {{"lr", 0.05}}}));
  CHECK(adagrad.lr == 0.05);
  CHECK(adagrad.eps == 1e-10);
  CHECK(adagrad.initial_accumulator_value == 0);
  CHECK(std::get<AdamW>(from_fields({"adamw", {}})).weight_decay == 0.01);
  CHECK(std::get<RmsProp>(from_fields({"rmsprop", {}})).lr == 0.01);
}

TEST_CASE("Invalid options are named") {
  const auto message = [](OptimizerFields fields) {
    return invalid_message([&] { from_fields(fields); });
  };
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double infinity = std::numeric_limits<double>::infinity();
  CHECK(message({"lamb", {}}) ==
        "no optimizer 'lamb': sgd, adagrad, adam, adamw, rmsprop, adadelta, adamax, rprop");
  CHECK(message({"rmsprop", {{"beta1", 0.9}}}) == "rmsprop has no option 'beta1'");
  CHECK(message({"rmsprop", {{"alpha", 1}}}) == "rmsprop: alpha cannot be 1.000000");
  CHECK(message({"rprop", {{"eta_minus", 1}}}) == "rprop: eta_minus cannot be 1.000000");
  CHECK(message({"rprop", {{"eta_plus", 1}}}) == "rprop: eta_plus cannot be 1.000000");
  CHECK(message({"rprop", {{"weight_decay", 1}}}) == "rprop has no option 'weight_decay'");
  CHECK(message({"adamw", {{"beta2", 1}}}) == "adamw: beta2 cannot be 1.000000");
  CHECK(message({"sgd", {{"eps", 1}}}) == "sgd has no option 'eps'");
  CHECK(message({"sgd", {{"lr", -1}}}) == "sgd: lr cannot be -1.000000");
  CHECK(message({"adagrad", {{"lr", nan}}}) == "adagrad: lr cannot be nan");
  CHECK(message({"adam", {{"lr", infinity}}}) == "adam: lr cannot be inf");
  CHECK(message({"adam", {{"beta1", 1}}}) == "adam: beta1 cannot be 1.000000");
  CHECK(message({"sgd", {{"nesterov", 1}}}) ==
        "sgd: nesterov wants a momentum above 0 and no dampening");
  CHECK(invalid_message([] { std::make_unique<UpdateRule>(Adam{-1}); }) ==
        "adam: lr cannot be -1.000000");
  CHECK_NOTHROW(from_fields({"sgd", {{"momentum", 0.9}, {"dampening", -0.5}}}));
}

}  // namespace distrain::optim
