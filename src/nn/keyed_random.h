#pragma once

#include <cstdint>
#include <unordered_map>

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace distrain::nn {

// Note [Random numbers of a pass]
//
// torch::nn's modules draw from torch's default generator, so the numbers of concurrent passes
// would not be reproducible. While a KeyedRandom exists, operations of its thread that take an
// optional generator and get none use the KeyedRandom's generator: a fallback of torch's dispatcher
// passes it. The fallback is registered once, for a dispatch key that torch reserves for such modes
// and that only threads with a KeyedRandom include.

/// While it exists, makes its thread's random numbers depend only on `seed` and `number`.
class KeyedRandom {
 public:
  /// kIgnored: operations that fill a tensor with random numbers leave it unchanged.
  enum class Fills : uint8_t { kByKey, kIgnored };

  KeyedRandom(uint64_t seed, uint64_t number, Fills fills = Fills::kByKey);
  ~KeyedRandom();
  KeyedRandom(const KeyedRandom&) = delete;

  /// Registers the dispatcher fallback. The first call must come before other threads call torch.
  static void install();

  at::Generator generator(c10::Device device);
  bool ignores_fills() const { return fills_ == Fills::kIgnored; }

 private:
  const uint64_t seed_;
  const Fills fills_;
  std::unordered_map<c10::Device, at::Generator> generators_;
  KeyedRandom* const previous_;
  const c10::impl::IncludeDispatchKeyGuard included_;
};

}  // namespace distrain::nn
