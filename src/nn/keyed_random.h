#pragma once

#include <cstdint>
#include <unordered_map>

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace distrain::nn {

// Note [Random numbers of a pass]
//
// torch::nn's modules draw from torch's default generator. Several passes at a time would take
// turns at it as it happens, and nothing they draw could be had again. So while a KeyedRandom
// lives, each operation of its thread that takes a generator and is given none gets the one of the
// key: a fallback of the dispatcher sees all operations of the thread first, and hands them on.
//
// It stands under a dispatch key that torch keeps free for such modes and that only a thread that
// asks for it looks at; there is one dispatcher, hence one registration, for the whole process.

/// Makes what this thread draws depend on the key alone.
class KeyedRandom {
 public:
  /// kIgnored: operations do not fill tensors with random numbers, as nobody needs their values.
  enum class Fills : uint8_t { kByKey, kIgnored };

  KeyedRandom(uint64_t seed, uint64_t number, Fills fills = Fills::kByKey);
  ~KeyedRandom();
  KeyedRandom(const KeyedRandom&) = delete;
  KeyedRandom& operator=(const KeyedRandom&) = delete;

  /// Once, before other threads call torch.
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
