#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <typeindex>

#include "distrain/base/future.h"
#include "distrain/rpc/incarnation.h"
#include "distrain/rpc/serialize.h"

namespace distrain::rpc {

class Agent;
class RRefContext;

/// In place of a call's own timeout: the agent's rpc_timeout.
inline constexpr std::chrono::nanoseconds kAgentsTimeout{-1};

/// A value that this rank owns, or will own once the call that makes it has run. Type-erased.
struct OwnedValue {
  using EncodeFunction = void (*)(Encoder&, const void*);

  base::Promise<std::shared_ptr<void>> value;
  // Written before `value` is set, read after.
  std::type_index type = typeid(void);
  EncodeFunction encode = nullptr;  ///< null when the type does not travel
};

/// One fork of an RRef on this rank: copies of an RRef<T> share it. Destroying the last copy on a
/// rank that is not the owner tells the owner. See Note [RRef protocol] in src/rpc/rref_context.h.
class RRefHandle {
 public:
  RRefHandle(std::shared_ptr<RRefContext> context, uint64_t id, uint64_t fork, ProcessNumber owner,
             std::shared_ptr<OwnedValue> owned);
  ~RRefHandle();
  RRefHandle(const RRefHandle&) = delete;
  RRefHandle& operator=(const RRefHandle&) = delete;

  uint64_t id() const { return id_; }
  uint64_t fork() const { return fork_; }
  int owner() const { return rank_of(owner_); }
  /// The process that has the value: it ends with that.
  ProcessNumber owning_process() const { return owner_; }
  bool is_owner() const { return owned_ != nullptr; }
  const std::shared_ptr<OwnedValue>& owned() const { return owned_; }
  Agent& agent() const;

  /// The value as T, waiting until it is there. Owner only.
  std::shared_ptr<void> local(std::type_index type) const;

  /// For a user whose creating call failed: to_here() then throws it.
  void set_creation_error(base::Error error);
  base::Status creation_status() const;

 private:
  const std::shared_ptr<RRefContext> context_;
  const uint64_t id_;
  const uint64_t fork_;
  const ProcessNumber owner_;
  std::shared_ptr<OwnedValue> owned_;  // owner only
  mutable std::mutex mutex_;
  base::Status creation_status_ = base::Unit{};
};

void encode_rref(Encoder& encoder, const std::shared_ptr<RRefHandle>& handle);
std::shared_ptr<RRefHandle> decode_rref(Decoder& decoder);

/// A reference to a value that lives on one rank, its owner, for as long as any rank holds a copy
/// of the reference. Can be an argument or a result of any call. A cheap handle; thread-safe.
template <class T>
class RRef {
 public:
  RRef() = default;
  explicit RRef(std::shared_ptr<RRefHandle> handle) : handle_(std::move(handle)) {}

  bool valid() const { return handle_ != nullptr; }
  int owner() const { return handle_->owner(); }
  bool is_owner() const { return handle_->is_owner(); }

  /// A copy of the value, fetched from its owner. Tensors carry gradients inside a context.
  /// Throws what the call that should have made the value threw.
  T to_here() const requires Serializable<T>;
  /// The same without waiting. `timeout` as To::timeout: max() for a value that may take as long as
  /// its owner lives. On the owner there is none.
  base::Future<T> to_here_async(std::chrono::nanoseconds timeout = kAgentsTimeout) const requires
      Serializable<T>;

  /// The value itself; waits until it is there. `invalid` on a rank that does not own it.
  T& local_value() const { return *static_cast<T*>(handle_->local(typeid(T)).get()); }
  /// The same as a shared pointer, for keeping it beyond the RRef.
  std::shared_ptr<T> local_pointer() const {
    return std::static_pointer_cast<T>(handle_->local(typeid(T)));
  }

  // Calls of a member function on the owner: as Agent's functions of the same names.
  template <auto F, class... Args>
  auto rpc_sync(Args&&... args) const;
  template <auto F, class... Args>
  auto rpc_async(Args&&... args) const;
  template <auto F, class... Args>
  auto remote(Args&&... args) const;

  const std::shared_ptr<RRefHandle>& handle() const { return handle_; }

 private:
  std::shared_ptr<RRefHandle> handle_;
};

template <class T>
struct Serializer<RRef<T>> {
  static void encode(Encoder& encoder, const RRef<T>& value) {
    encode_rref(encoder, value.handle());
  }
  static RRef<T> decode(Decoder& decoder) { return RRef<T>(decode_rref(decoder)); }
};

}  // namespace distrain::rpc
