#include <torch/optim.h>

#include "distrain/autograd/context.h"
#include "distrain/optim/distributed_optimizer.h"
#include "remote_layers.h"
#include "support/catch.h"
#include "support/cluster.h"

using namespace distrain;
using optim::DistributedOptimizer;
using optim::OptimizerOptions;
using rpc::Agent;
using rpc::RRef;
using testing::Cluster;
using testing::Layer;

TEST_CASE("each rule over two owners gives the parameters that torch.optim gives") {
  struct Case {
    OptimizerOptions options;
    std::vector<double> wanted;  // computed with PyTorch 2.11, both weights row by row
  };
  const std::vector<Case> cases = {
      Case{optim::Adagrad{.lr = 0.05},
           {0.396990881257423, 0.49213026357916, 0.0287851052272019, 0.175654222650065,
            0.78456329192879, -0.10375416856387, 0.398036553774167, 0.468690610704582}},
      Case{optim::Adam{.lr = 1e-2, .amsgrad = true},
           {0.176558963600198, 0.279501343868997, 0.224141209596962, 0.352920526978931,
            0.465535221721217, -0.320726175997789, 0.270646523582884, 0.279280643580211}},
      Case{optim::AdamW{.lr = 0.05, .amsgrad = true},
           {0.471032577732349, 0.588803998504863, -0.0253408053258862, 0.158136410853633,
            0.829928188250332, -0.00657573257568414, 0.3239421197932, 0.598108193060482}},
      Case{optim::Sgd{.lr = 0.05},
           {0.277688814044503, 0.719593446125565, 0.0251640991813341, 0.0602245392484376,
            0.593475567777974, -0.146572169645717, 0.513156446615096, 0.661447552159779}},
      Case{optim::Sgd{.lr = 1e-3, .momentum = 1, .weight_decay = 1, .nesterov = true},
           {0.110364950800559, 0.225437913307298, 0.231902443187745, 0.345588389112302,
            0.455568085446801, -0.355457775357641, 0.261198582095227, 0.223363324237542}},
      Case{optim::Adadelta{.rho = 0.95},
           {0.171823002228166, 0.255238403734233, 0.233208821315167, 0.32803616143081,
            0.442998253131529, -0.34351183848392, 0.251167615699621, 0.24845331100017}},
      Case{optim::RmsProp{.lr = 0.05},
           {1.44788166093324, 1.38151605939646, -0.116948029743633, 0.510714987124022,
            0.670343259968582, 0.407545192060644, 0.451236808528677, 0.64007287785386}},
      Case{optim::Adamax{.lr = 0.05},
           {0.360568906190033, 0.483214917142738, 0.0279332735448796, 0.276471310064132,
            0.660962022288907, -0.110097606448269, 0.229653701293965, 0.527471129273065}},
      Case{optim::Rprop{.lr = 0.05},
           {0.7457952, 1.02495424, 0.041968, 0.201752, 1.1457952, 0.42495424, 0.328, 1.02495424}},
      Case{optim::Adadelta{.lr = 0.5, .rho = 0.8, .eps = 1e-3, .weight_decay = 0.1},
           {0.530301028071679, 0.668435987744881, 0.0455224986634227, 0.0761610428827656,
            0.7397591282744, 0.0968351100083958, 0.539856825859984, 0.680795061360434}},
      Case{optim::Adamax{0.1, 0.8, 0.9, 1e-3, 0.1},
           {0.681257216389075, 0.794938621729083, 0.0547570641979455, 0.0781836349223264,
            1.0315542184596, 0.224770176900999, 0.494070087357447, 0.861453497242367}},
      Case{optim::Rprop{0.2, 0.3, 1.5, 0.1, 0.25}, {1.05, 0.9, -0.05, 0.6, 1.2, 0.7, 0.75, 1}}};
  Cluster cluster(3, [](Agent& agent) {
    autograd::install(agent);
    optim::install(agent);
    testing::expose_layers(agent);
  });
  for (const Case& each : cases) {
    CAPTURE(&each - cases.data());
    Agent& agent = cluster[0];
    const auto first = agent.remote_new<Layer>(1, at::tensor({0.1, 0.2, 0.3, 0.4}).view({2, 2}));
    const auto second = agent.remote_new<Layer>(2, at::tensor({0.5, -0.4, 0.3, 0.2}).view({2, 2}));
    DistributedOptimizer optimizer(
        agent, {first.rpc_sync<&Layer::parameter>(), second.rpc_sync<&Layer::parameter>()},
        each.options);
    for (int step = 0; step < 8; ++step) {
      const at::Tensor x = at::tensor({1.0, -2.0, 0.5, 3.0}).view({2, 2}) * (1 + step) / 4;
      autograd::Context context(agent);
      const at::Tensor hidden = first.rpc_sync<&Layer::forward>(x).tanh();
      autograd::backward(context, {(second.rpc_sync<&Layer::forward>(hidden) - 1).pow(2).sum()});
      optimizer.step(context);
    }
    const at::Tensor weights = at::cat(
        {first.rpc_sync<&Layer::value>().flatten(), second.rpc_sync<&Layer::value>().flatten()});
    CHECK(at::allclose(weights, at::tensor(each.wanted), 1e-12, 1e-12));
  }
}
