#include "keyed_random.h"

#include <array>
#include <random>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <torch/library.h>

#include "distrain/rpc/device.h"

namespace distrain::nn {

namespace {

constexpr c10::DispatchKey kKey = c10::DispatchKey::TESTING_ONLY_GenericMode;

thread_local KeyedRandom* t_random = nullptr;

uint64_t mixed(uint64_t seed, uint64_t number) {
  const auto low = [](uint64_t x) { return static_cast<uint32_t>(x); };
  std::seed_seq sequence{low(seed), low(seed >> 32), low(number), low(number >> 32)};
  std::array<uint32_t, 2> words{};
  sequence.generate(words.begin(), words.end());
  return (uint64_t{words[0]} << 32) | words[1];
}

bool takes_generator(const c10::Argument& argument) {
  const auto optional = argument.type()->cast<c10::OptionalType>();
  return optional && optional->getElementType()->kind() == c10::TypeKind::GeneratorType;
}

// Returns the device of an operation's random numbers: that of its first tensor or device argument.
c10::Device device_of(const torch::jit::Stack& stack, size_t first) {
  for (size_t i = first; i < stack.size(); ++i) {
    if (stack[i].isTensor() && stack[i].toTensor().defined()) return stack[i].toTensor().device();
    if (stack[i].isDevice()) return stack[i].toDevice();
  }
  return c10::kCPU;
}

// Replaces aten::native_dropout on accelerators, because its kernel there takes no generator.
void drop_out(KeyedRandom& random, torch::jit::Stack& stack) {
  const bool train = stack.back().toOptional<bool>().value_or(true);
  const double p = stack[stack.size() - 2].toDouble();
  const at::Tensor x = stack[stack.size() - 3].toTensor();
  torch::jit::drop(stack, 3);
  const at::Tensor mask = at::empty(x.sizes(), x.options().requires_grad(false));
  train ? mask.bernoulli_(1 - p, random.generator(x.device())) : mask.fill_(1);
  const double scale = !train ? 1 : p == 1 ? 0 : 1 / (1 - p);
  torch::jit::push(stack, x * mask * scale, mask.to(at::kBool));
}

void draw_by_key(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                 torch::jit::Stack* stack) {
  // Torch's worker threads inherit this dispatch key but have no `t_random`, so they draw as usual.
  if (KeyedRandom* random = t_random) {
    const auto& arguments = op.schema().arguments();
    const size_t first = stack->size() - arguments.size();
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (!takes_generator(arguments[i]) || !(*stack)[first + i].isNone()) continue;
      if (random->ignores_fills() && op.schema().name().ends_with('_')) {
        return torch::jit::drop(*stack, arguments.size() - 1);  // returns the first argument
      }
      (*stack)[first + i] = random->generator(device_of(*stack, first));
    }
    if (op.schema().name() == "aten::native_dropout" &&
        rpc::is_accelerator(device_of(*stack, first))) {
      return drop_out(*random, *stack);
    }
  }
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey), stack);
}

}  // namespace

void KeyedRandom::install() {
  // Never destroy the library, because other threads may draw until the process ends.
  static const torch::Library& library =
      (new torch::Library(torch::Library::IMPL, "_", kKey, __FILE__, __LINE__))
          ->fallback(torch::CppFunction::makeFromBoxedFunction<&draw_by_key>());
  static_cast<void>(library);
}

KeyedRandom::KeyedRandom(uint64_t seed, uint64_t number, Fills fills)
    : seed_(mixed(seed, number)), fills_(fills), previous_(t_random), included_(kKey) {
  t_random = this;
}

KeyedRandom::~KeyedRandom() { t_random = previous_; }

at::Generator KeyedRandom::generator(c10::Device device) {
  at::Generator& generator = generators_[device];
  if (!generator.defined()) {
    if (device.is_cpu()) return generator = at::make_generator<at::CPUGeneratorImpl>(seed_);
    generator = at::globalContext()
                    .getAcceleratorHooksInterface(device.type())
                    .getNewGenerator(device.index());
    generator.set_current_seed(seed_);
  }
  return generator;
}

}  // namespace distrain::nn
