#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include "distrain/optim/single_process_optimizer.h"
#include "distrain/optim/update_rule.h"
#include "invalid_message.h"
#include "sparse_gradients.h"
#include "support/catch.h"

namespace distrain::optim {
namespace {

// Runs our rule and torch's on the same gradients and compares after every step.
void compare_dense(
    const OptimizerOptions& options,
    const std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<at::Tensor>)>&
        make_reference,
    at::ScalarType type = at::kFloat) {
  at::manual_seed(3);
  std::vector<at::Tensor> own, reference;
  for (const auto& shape : std::vector<std::vector<int64_t>>{{4, 3}, {7}, {2, 3, 5}, {}, {0, 3}}) {
    own.push_back(at::randn(shape, type).requires_grad_(true));
    reference.push_back(own.back().detach().clone().requires_grad_(true));
  }
  const auto rule = std::make_unique<UpdateRule>(options);
  const auto optimizer = make_reference(reference);
  const double near = type == at::kDouble ? 1e-12 : 1e-6;
  for (int step = 0; step < kSteps; ++step) {
    for (size_t i = 0; i < own.size(); ++i) {
      at::Tensor gradient = at::randn(own[i].sizes(), type);
      if (i == 1) gradient = at::randn({1}, type).expand({7});  // like the gradient of a sum
      rule->apply(i, own[i], gradient);
      reference[i].mutable_grad() = gradient.clone();
    }
    optimizer->step();
    for (size_t i = 0; i < own.size(); ++i) {
      CAPTURE(step, i);
      REQUIRE(difference(own[i], reference[i]) <= near);
    }
  }
  CHECK(rule->step_count(0) == kSteps);
  CHECK(own[0].is_leaf());
  CHECK(own[0].requires_grad());
}

}  // namespace

TEST_CASE("Dense SGD equals torch's") {
  const Sgd options = GENERATE(Sgd{0.1}, Sgd{0.1, 0.9}, Sgd{0.1, 0, 0.01}, Sgd{0.1, 0.9, 0.01, 0.3},
                               Sgd{0.1, 0.8, 0.02, 0, true});
  const auto make = [&](std::vector<at::Tensor> parameters) {
    return std::make_unique<torch::optim::SGD>(std::move(parameters),
                                               torch::optim::SGDOptions(options.lr)
                                                   .momentum(options.momentum)
                                                   .weight_decay(options.weight_decay)
                                                   .dampening(options.dampening)
                                                   .nesterov(options.nesterov));
  };
  compare_dense(options, make);
  compare_dense(options, make, at::kDouble);
}

TEST_CASE("Dense Adagrad equals torch's") {
  const Adagrad options = GENERATE(Adagrad{0.05}, Adagrad{0.05, 0.1}, Adagrad{0.05, 0, 0.01},
                                   Adagrad{0.05, 0.01, 0.02, 0.1, 1e-6});
  compare_dense(options, [&](std::vector<at::Tensor> parameters) {
    return std::make_unique<torch::optim::Adagrad>(
        std::move(parameters), torch::optim::AdagradOptions(options.lr)
                                   .lr_decay(options.lr_decay)
                                   .weight_decay(options.weight_decay)
                                   .initial_accumulator_value(options.initial_accumulator_value)
                                   .eps(options.eps));
  });
}

TEST_CASE("Dense Adam equals torch's") {
  const Adam options =
      GENERATE(Adam{0.01}, Adam{0.01, 0.8, 0.99, 1e-6}, Adam{0.01, 0.9, 0.999, 1e-8, 0.02},
               Adam{0.01, 0.9, 0.9, 1e-8, 0.02, true});
  compare_dense(options, [&](std::vector<at::Tensor> parameters) {
    return std::make_unique<torch::optim::Adam>(std::move(parameters),
                                                torch::optim::AdamOptions(options.lr)
                                                    .betas({options.beta1, options.beta2})
                                                    .eps(options.eps)
                                                    .weight_decay(options.weight_decay)
                                                    .amsgrad(options.amsgrad));
  });
}

TEST_CASE("Dense AdamW equals torch's") {
  const AdamW options =
      GENERATE(AdamW{}, AdamW{0.01, 0.8, 0.99, 1e-6, 0.3}, AdamW{0.01, 0.9, 0.999, 1e-8, 0},
               AdamW{0.1, 0.9, 0.9, 1e-8, 0.2, true});
  const auto make = [&](std::vector<at::Tensor> parameters) {
    return std::make_unique<torch::optim::AdamW>(std::move(parameters),
                                                 torch::optim::AdamWOptions(options.lr)
                                                     .betas({options.beta1, options.beta2})
                                                     .eps(options.eps)
                                                     .weight_decay(options.weight_decay)
                                                     .amsgrad(options.amsgrad));
  };
  compare_dense(options, make);
  compare_dense(options, make, at::kDouble);
}

TEST_CASE("Dense RMSprop equals torch's") {
  const RmsProp options =
      GENERATE(RmsProp{}, RmsProp{0.05, 0.9, 1e-6, 0.02}, RmsProp{0.02, 0.8, 1e-5, 0, 0.9},
               RmsProp{0.02, 0.9, 1e-4, 0, 0, true}, RmsProp{0.01, 0.95, 1e-4, 0.01, 0.7, true});
  const auto make = [&](std::vector<at::Tensor> parameters) {
    return std::make_unique<torch::optim::RMSprop>(std::move(parameters),
                                                   torch::optim::RMSpropOptions(options.lr)
                                                       .alpha(options.alpha)
                                                       .eps(options.eps)
                                                       .weight_decay(options.weight_decay)
                                                       .momentum(options.momentum)
                                                       .centered(options.centered));
  };
  compare_dense(options, make);
  compare_dense(options, make, at::kDouble);
}

TEST_CASE("Adadelta, Adamax and Rprop give the parameters that torch.optim gives") {
  // LibTorch lacks these rules. The values were computed with PyTorch 2.11 in float64.
  struct Case {
    OptimizerOptions options;
    std::vector<double> expected;
  };
  const Case each = GENERATE(
      Case{Adadelta{},
           {0.05175012805540951, -0.20642308940384355, 0.3032255494902794, 0.35174787224539095}},
      Case{Adadelta{.rho = 0.95},
           {0.03188670630733606, -0.2091207810039483, 0.3045773401699545, 0.33188025215490946}},
      Case{Adadelta{0.5, 0.8, 1e-3, 0.1},
           {-0.4243934725690517, -0.26891663094031404, 0.3213723061064851, -0.13561710066834823}},
      Case{Adamax{},
           {0.08870185516601901, -0.19701929605687277, 0.29830932393290743, 0.38870185504979804}},
      Case{Adamax{.lr = 0.05},
           {-0.18245362084952493, -0.1254824014218189, 0.2577330983226861, 0.11754637624495001}},
      Case{Adamax{0.1, 0.8, 0.9, 1e-3, 0.1},
           {-0.4982242175858015, -0.06213733012404758, 0.19736219885311362, -0.19855017476944958}},
      Case{Rprop{}, {-0.064990848, -0.1825, 0.28125, 0.235009152}},
      Case{Rprop{.lr = 0.05}, {-0.72495424, -0.1125, 0.20625, -0.42495424}},
      Case{Rprop{0.2, 0.3, 1.5, 0.1, 0.25}, {-1.85, 0.15, -0.2, -1.55}});
  for (const at::ScalarType type : {at::kFloat, at::kDouble}) {
    CAPTURE(each.options.index(), type);
    const auto rule = std::make_unique<UpdateRule>(each.options);
    at::Tensor parameter = at::tensor({0.1, -0.2, 0.3, 0.4}, type);
    for (int step = 0; step < 8; ++step) {
      // The signs of two elements change, one of them in each step.
      const double every_second = step / 2 % 2 == 0 ? 1 : -1, each_time = step % 2 == 0 ? 1 : -1;
      rule->apply(
          0, parameter,
          at::tensor({1.0, -2.0 * every_second, 0.5 * each_time, 3.0}, type) * ((1 + step) / 4.0));
    }
    CHECK(parameter.scalar_type() == type);
    CHECK(difference(parameter, at::tensor(each.expected, type)) <=
          (type == at::kDouble ? 1e-14 : 3e-7));
  }
}

TEST_CASE("A factor of the learning rate has the effect of another learning rate") {
  at::manual_seed(8);
  const auto options = [](double lr) {
    return std::vector<OptimizerOptions>{Sgd{.lr = lr, .momentum = 0.9},
                                         Adagrad{.lr = lr, .lr_decay = 0.1},
                                         Adam{.lr = lr},
                                         AdamW{.lr = lr, .weight_decay = 0.1},
                                         RmsProp{.lr = lr, .momentum = 0.9},
                                         Adadelta{.lr = lr},
                                         Adamax{.lr = lr}};
  };
  for (size_t which = 0; which < options(1).size(); ++which) {
    CAPTURE(which);
    const auto scaled = std::make_unique<UpdateRule>(options(0.4)[which]);
    const auto plain = std::make_unique<UpdateRule>(options(0.1)[which]);
    scaled->set_lr_factor(0.25);
    at::Tensor a = at::randn({3, 2}, at::kDouble), b = a.clone();
    for (int step = 0; step < 3; ++step) {
      const at::Tensor gradient = at::randn({3, 2}, at::kDouble);
      scaled->apply(0, a, gradient);
      plain->apply(0, b, gradient);
    }
    CHECK(difference(a, b) <= 1e-14);
    scaled->set_lr_factor(1);
    scaled->apply(0, a, at::ones({3, 2}, at::kDouble));
    plain->apply(0, b, at::ones({3, 2}, at::kDouble));
    CHECK(difference(a, b) > 1e-3);
  }
  const auto rule = std::make_unique<UpdateRule>(Sgd{});
  CHECK(invalid_message([&] { rule->set_lr_factor(-1); }) ==
        "a learning rate cannot be multiplied by -1.000000");
  CHECK(invalid_message([&] { rule->set_lr_factor(std::nan("")); }) ==
        "a learning rate cannot be multiplied by nan");
}

TEST_CASE("The state has PyTorch's names, and training resumes from it with the same bits") {
  struct Case {
    OptimizerOptions options;
    std::vector<std::string> names;
  };
  const Case each = GENERATE(
      Case{Sgd{.lr = 0.1}, {"step"}},
      Case{Sgd{.lr = 0.1, .momentum = 0.9}, {"momentum_buffer", "step"}},
      Case{Adagrad{.lr = 0.1}, {"step", "sum"}},
      Case{Adam{.lr = 0.1}, {"exp_avg", "exp_avg_sq", "step"}},
      Case{AdamW{.lr = 0.1, .amsgrad = true}, {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"}},
      Case{RmsProp{.lr = 0.1}, {"square_avg", "step"}},
      Case{RmsProp{.lr = 0.1, .momentum = 0.9, .centered = true},
           {"grad_avg", "momentum_buffer", "square_avg", "step"}},
      Case{Adadelta{}, {"acc_delta", "square_avg", "step"}},
      Case{Adamax{}, {"exp_avg", "exp_inf", "step"}}, Case{Rprop{}, {"prev", "step", "step_size"}});
  at::manual_seed(9);
  const auto first = std::make_unique<UpdateRule>(each.options);
  at::Tensor parameter = at::randn({4, 3});
  for (int step = 0; step < 3; ++step) first->apply(0, parameter, at::randn({4, 3}));
  std::vector<std::string> names;
  for (const auto& [name, value] : first->state(0)) names.push_back(name);
  CHECK(names == each.names);

  const auto second = std::make_unique<UpdateRule>(each.options);
  at::Tensor copy = parameter.clone();
  second->adopt(0, second->load(0, copy, first->state(0)));
  for (int step = 0; step < 3; ++step) {
    const at::Tensor gradient = at::randn({4, 3});
    first->apply(0, parameter, gradient);
    second->apply(0, copy, gradient);
  }
  CHECK(at::equal(copy, parameter));
}

TEST_CASE("A state of torch.optim, whose step is a float or missing, is loaded") {
  // What torch.optim's state_dict()["state"][0] has in Python after three steps of each optimizer.
  struct Case {
    OptimizerOptions options;
    std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<at::Tensor>)> make;
    std::function<ParameterState(torch::optim::OptimizerParamState& state)> state_of;
  };
  using torch::optim::AdagradParamState, torch::optim::AdamParamState,
      torch::optim::RMSpropParamState, torch::optim::SGDParamState;
  const auto number = [](int64_t step) {
    return at::full({}, static_cast<double>(step), at::kFloat);
  };
  const std::vector<Case> cases = {
      {Adam{.lr = 0.1, .amsgrad = true},
       [](auto p) {
         return std::make_unique<torch::optim::Adam>(p,
                                                     torch::optim::AdamOptions(0.1).amsgrad(true));
       },
       [&](auto& state) {
         auto& its = static_cast<AdamParamState&>(state);
         return ParameterState{{"step", number(its.step())},
                               {"exp_avg", its.exp_avg()},
                               {"exp_avg_sq", its.exp_avg_sq()},
                               {"max_exp_avg_sq", its.max_exp_avg_sq()}};
       }},
      {Adagrad{.lr = 0.1, .lr_decay = 0.5},
       [](auto p) {
         return std::make_unique<torch::optim::Adagrad>(
             p, torch::optim::AdagradOptions(0.1).lr_decay(0.5));
       },
       [&](auto& state) {
         auto& its = static_cast<AdagradParamState&>(state);
         return ParameterState{{"step", number(its.step())}, {"sum", its.sum()}};
       }},
      {RmsProp{.lr = 0.1, .momentum = 0.9},
       [](auto p) {
         return std::make_unique<torch::optim::RMSprop>(
             p, torch::optim::RMSpropOptions(0.1).momentum(0.9));
       },
       [&](auto& state) {
         auto& its = static_cast<RMSpropParamState&>(state);
         return ParameterState{{"step", number(its.step())},
                               {"square_avg", its.square_avg()},
                               {"momentum_buffer", its.momentum_buffer()}};
       }},
      {Sgd{.lr = 0.1, .momentum = 0.9},
       [](auto p) {
         return std::make_unique<torch::optim::SGD>(p, torch::optim::SGDOptions(0.1).momentum(0.9));
       },
       [&](auto& state) {
         return ParameterState{
             {"momentum_buffer", static_cast<SGDParamState&>(state).momentum_buffer()}};
       }},
  };
  at::manual_seed(11);
  for (const Case& each : cases) {
    const at::Tensor theirs = at::randn({4, 3}).requires_grad_(true);
    const auto reference = each.make({theirs});
    const auto step = [&] {
      theirs.mutable_grad() = at::randn({4, 3});
      reference->step();
    };
    for (int i = 0; i < 3; ++i) step();
    const auto rule = std::make_unique<UpdateRule>(each.options);
    at::Tensor ours = theirs.detach().clone();
    rule->adopt(0, rule->load(0, ours, each.state_of(*reference->state().begin()->second)));
    for (int i = 0; i < 3; ++i) {
      step();
      rule->apply(0, ours, theirs.grad());
      CHECK(at::allclose(ours, theirs.detach(), 1e-6, 1e-7));
    }
  }

  const at::Tensor parameter = at::zeros({2});
  const auto adam = std::make_unique<UpdateRule>(Adam{}), sgd = std::make_unique<UpdateRule>(Sgd{});
  const auto refused = [&](const UpdateRule& rule, const ParameterState& state) {
    try {
      rule.load(0, parameter, state);
    } catch (const base::Exception& e) {
      CHECK(e.kind() == base::ErrorKind::kBadData);
      return std::string(e.what());
    }
    return std::string("(loaded)");
  };
  CHECK(refused(*sgd, {}) == "(loaded)");  // torch.optim.SGD without momentum
  CHECK(refused(*adam, {{"exp_avg", parameter}, {"exp_avg_sq", parameter}}).find("no step") !=
        std::string::npos);
  for (const double step : {1.5, -1.0, std::nan(""), HUGE_VAL}) {
    const ParameterState state = {{"step", at::full({}, step, at::kDouble)},
                                  {"exp_avg", parameter},
                                  {"exp_avg_sq", parameter}};
    CHECK(refused(*adam, state).find("step is no whole number") != std::string::npos);
  }
}

TEST_CASE("State belongs to the index, not to the tensor") {
  const auto rule = std::make_unique<UpdateRule>(Sgd{1.0, 0.5});
  at::Tensor parameter = at::zeros({1});
  rule->apply(2, parameter, at::ones({1}));
  at::Tensor copy = parameter.clone();
  rule->apply(2, copy, at::ones({1}));
  CHECK(copy.item<float>() == Approx(-2.5));
  CHECK(parameter.item<float>() == Approx(-1.0));
  CHECK(rule->step_count(2) == 2);
  CHECK(rule->step_count(0) == 0);
  CHECK(rule->step_count(99) == 0);
}

TEST_CASE("The gradient itself is not modified") {
  const OptimizerOptions options =
      GENERATE(OptimizerOptions(Sgd{0.1, 0.9, 0.1}), OptimizerOptions(Adagrad{0.1, 0, 0.1}),
               OptimizerOptions(Adam{0.1, 0.9, 0.999, 1e-8, 0.1}), OptimizerOptions(AdamW{}),
               OptimizerOptions(RmsProp{0.1, 0.9, 1e-8, 0.1, 0.9, true}));
  const auto rule = std::make_unique<UpdateRule>(options);
  at::Tensor parameter = at::ones({3});
  const at::Tensor gradient = at::ones({3});
  for (int step = 0; step < 3; ++step) rule->apply(0, parameter, gradient);
  CHECK(at::equal(gradient, at::ones({3})));
}

TEST_CASE("A gradient that does not fit is refused and changes nothing") {
  const auto rule = std::make_unique<UpdateRule>(Sgd{0.1});
  at::Tensor parameter = at::ones({3, 2});
  const auto message = [&](const at::Tensor& gradient) {
    return invalid_message([&] { rule->apply(4, parameter, gradient); });
  };
  CHECK(message(at::ones({2, 3})) ==
        "the gradient of parameter 4 has shape [2, 3], the parameter [3, 2]");
  CHECK(message(at::ones({3, 2}, at::kDouble)) ==
        "the gradient of parameter 4 is Double, the parameter Float");
  CHECK(message(at::Tensor()) == "parameter 4 has no gradient");
  CHECK(message(at::ones({3, 2}).to_sparse(2)) ==
        "the gradient of parameter 4 is neither dense nor sparse by rows");
  CHECK(message(at::ones({3, 2}).to_sparse_csr()) ==
        "the gradient of parameter 4 is neither dense nor sparse by rows");
  CHECK(message(at::empty({3, 2}, at::device(at::kMeta))) ==
        "the gradient of parameter 4 is on meta, the parameter on cpu");
  for (const int64_t row : {-1, 3}) {
    CHECK(message(at::_sparse_coo_tensor_unsafe(at::full({1, 1}, row, at::kLong), at::ones({1, 2}),
                                                {3, 2})) ==
          "the gradient of parameter 4 is for a row outside 0 to 2");
  }
  CHECK(at::equal(parameter, at::ones({3, 2})));
  CHECK(rule->step_count(4) == 0);

  at::Tensor integers = at::ones({2}, at::kLong);
  CHECK(invalid_message([&] { rule->apply(0, integers, integers); }) ==
        "parameter 0 is not a dense floating point tensor");
  at::Tensor none;
  CHECK(invalid_message([&] { rule->apply(0, none, integers); }) ==
        "parameter 0 is an undefined tensor");
}

TEST_CASE("in one process a trainer without a gradient counts as zero, as in sync mode") {
  const bool shared = GENERATE(false, true);
  const int without = GENERATE(0, 1);
  at::Tensor weight = at::zeros({2}).requires_grad_(), unused = at::ones({2}).requires_grad_();
  const NamedParameters some{{"weight", weight}, {"unused", unused}};
  SingleProcessOptimizer optimizer({.options = Sgd{.lr = 1}}, "sync",
                                   shared ? some : NamedParameters{},
                                   shared ? NamedParameters{} : some);
  for (int trainer : {0, 1}) {
    if (trainer != without) (weight * 3).sum().backward();
    optimizer.gather();
  }
  optimizer.step();
  CHECK(at::equal(weight.detach(), at::full({2}, -1.5)));
  CHECK(at::equal(unused.detach(), at::ones({2})));
}

TEST_CASE("a module's parameters are replicas, or shared if a mode is given, and are numbered") {
  const torch::nn::Linear net(2, 1);
  const at::Tensor before = net->weight.detach().clone();
  const std::string mode = GENERATE("", "sync", "async");
  CAPTURE(mode);
  SingleProcessOptimizer optimizer(*net, {.options = Sgd{.lr = 1}}, mode);
  CHECK(optimizer.names() == std::vector<std::string>{"0", "1"});
  CHECK(optimizer.has_replicas() == mode.empty());
  for (const double gradient : {1, 3}) {
    (net->weight * gradient).sum().backward();
    optimizer.gather();
  }
  optimizer.step();
  CHECK(at::allclose(net->weight, before - (mode == "async" ? 4 : 2)));
}

}  // namespace distrain::optim
