// `my_job 0 PORT` and `my_job 1 PORT` are two ranks: rank 1 calls rank 0 for a sum and runs a
// backward pass through the call. `my_job symbols` prints the library that exports libuv's uv_run,
// which must be libtorch_cpu. `my_job cuda` loads libdistrain_cuda.so and prints why CUDA is
// unavailable.
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string_view>

#include <dlfcn.h>

#include <distrain/cuda/load.h>
#include <distrain/distrain.h>

using namespace distrain;

at::Tensor add(at::Tensor a, at::Tensor b) { return at::add(a, b); }

const char* object_of(void* address) {
  Dl_info info{};
  return address && dladdr(address, &info) ? info.dli_fname : "nowhere";
}

bool is_right(rpc::Agent& agent) {
  const at::Tensor x = at::ones({3}).requires_grad_();
  autograd::Context context(agent);
  const at::Tensor sum = agent.rpc_sync<&add>("first", x, at::full({3}, 2.0));
  autograd::backward(context, {sum.sum()});
  return at::equal(sum, at::full({3}, 3.0)) && at::equal(context.gradient(x), at::ones({3}));
}

int run_rank(int rank, uint16_t port) {
  rpc::AgentOptions options;
  options.rank = rank;
  options.names = {"first", "second"};
  options.master_port = port;
  rpc::Agent agent(options);
  autograd::install(agent);
  agent.expose<&add>("add");
  agent.join();
  const bool right = rank == 0 || is_right(agent);
  agent.shutdown();
  return right ? 0 : 1;
}

int main(int argc, char** argv) try {
  const std::string_view first = argc > 1 ? argv[1] : "";
  if (first == "symbols") {
    std::puts(object_of(dlsym(RTLD_DEFAULT, "uv_run")));
    return 0;
  }
  if (first == "cuda") {
    cuda::load();
    return 0;
  }
  if (argc == 3) return run_rank(std::atoi(argv[1]), static_cast<uint16_t>(std::atoi(argv[2])));
  return app::main(argc, argv, {});
} catch (const std::exception& e) {
  std::fprintf(stderr, "my_job: %s\n", e.what());
  return 1;
}
