#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <typeindex>
#include <utility>

#include "distrain/base/future.h"
#include "distrain/rpc/channel.h"
#include "distrain/rpc/serialize.h"

namespace distrain::rpc {

class Agent;
class RRefContext;
class To;

/// A timeout that stands for the agent's rpc_timeout.
inline constexpr std::chrono::nanoseconds kAgentsTimeout{-1};

/// A type-erased value that this rank owns, or will own after the call that creates it has run.
struct OwnedValue {
  using EncodeFunction = void (*)(Encoder&, const void*);

  base::Promise<std::shared_ptr<void>> value;
  // `type` and `encode` are written before `value` is set, and read only after that.
  std::type_index type = typeid(void);
  EncodeFunction encode = nullptr;  ///< null if the type is not serializable
};

/// One fork (counted reference) of an RRef. Copies of an RRef<T> on this rank share one handle. If
/// another rank is the owner, destroying the handle notifies that rank: see Note [RRef protocol].
class RRefHandle {
 public:
  RRefHandle(std::shared_ptr<RRefContext> context, uint64_t id, uint64_t fork, ProcessNumber owner,
             std::shared_ptr<OwnedValue> owned)
      : context_(std::move(context)),
        id_(id),
        fork_(fork),
        owner_(owner),
        owned_(std::move(owned)) {}
  ~RRefHandle();
  RRefHandle(const RRefHandle&) = delete;
  RRefHandle& operator=(const RRefHandle&) = delete;

  uint64_t id() const { return id_; }
  uint64_t fork() const { return fork_; }
  int owner() const { return rank_of(owner_); }
  /// Returns the process that owns the value. If that process is lost, the value is lost too.
  ProcessNumber owning_process() const { return owner_; }
  bool is_owner() const { return owned_ != nullptr; }
  const std::shared_ptr<OwnedValue>& owned() const { return owned_; }
  Agent& agent() const;
  /// Returns "RRef 7 on rank 1", for messages.
  std::string text() const {
    return "RRef " + std::to_string(id_) + " on rank " + std::to_string(owner());
  }
  /// Waits for the value, without a limit if `timeout` is kAgentsTimeout. Throws `deadline` at the
  /// timeout, and `invalid` if another rank owns the value or its type is not `type`.
  std::shared_ptr<void> local(std::type_index type,
                              std::chrono::nanoseconds timeout = kAgentsTimeout) const;
  /// Sets the result of the call that creates the value, if this rank made that call. If the result
  /// is an error, to_here() throws it.
  void set_created(base::Status result) { created_.complete(std::move(result)); }
  base::Future<void> created() const { return created_.future(); }

 private:
  const std::shared_ptr<RRefContext> context_;
  const uint64_t id_;
  const uint64_t fork_;
  const ProcessNumber owner_;
  std::shared_ptr<OwnedValue> owned_;  // null unless this rank is the owner
  base::Promise<void> created_;
};

void encode_rref(Encoder& encoder, const std::shared_ptr<RRefHandle>& handle);
std::shared_ptr<RRefHandle> decode_rref(Decoder& decoder);

/// A reference to a value on one rank, the owner. The value lives as long as any rank holds a copy
/// of the reference. Calls can have RRefs as arguments and results. Cheap to copy; thread-safe.
template <class T>
class RRef {
 public:
  RRef() = default;
  explicit RRef(std::shared_ptr<RRefHandle> handle) : handle_(std::move(handle)) {}

  bool valid() const { return handle_ != nullptr; }
  int owner() const { return handle_->owner(); }
  bool is_owner() const { return handle_->is_owner(); }
  /// Returns a copy of this reference whose functions below have this timeout instead of the
  /// agent's rpc_timeout: `rref.timeout(2s).rpc_sync<&Table::rows>()`.
  RRef timeout(std::chrono::nanoseconds limit) const { return RRef(handle_, limit); }
  /// Returns a future that is done when the value exists. Fails if the call that should have
  /// created the value failed, or at the timeout.
  base::Future<void> created() const;
  /// Fetches a copy of the value from its owner. Inside an autograd context, gradients flow through
  /// the tensors in it. If the call that should have created the value failed, throws that error.
  T to_here() const requires Serializable<T>;
  /// Fetches a copy of the value as a future. No limit on the owner.
  base::Future<T> to_here_async() const requires Serializable<T>;

  /// Waits until the value exists and returns it. Throws `invalid` if this rank is not its owner.
  T& local_value() const { return *static_cast<T*>(handle_->local(typeid(T)).get()); }
  /// Waits for the value and returns a pointer that keeps it alive. Throws like local_value().
  std::shared_ptr<T> local_pointer() const {
    return std::static_pointer_cast<T>(handle_->local(typeid(T)));
  }
  // Call a member function of the value on its owner, like Agent's functions with these names.
  template <auto F, class... Args>
  auto rpc_sync(Args&&... args) const;
  template <auto F, class... Args>
  auto rpc_async(Args&&... args) const;
  template <auto F, class... Args>
  auto remote(Args&&... args) const;

  const std::shared_ptr<RRefHandle>& handle() const { return handle_; }

 private:
  RRef(std::shared_ptr<RRefHandle> handle, std::chrono::nanoseconds timeout)
      : handle_(std::move(handle)), timeout_(timeout) {}
  To owning_rank() const;

  std::shared_ptr<RRefHandle> handle_;
  std::chrono::nanoseconds timeout_ = kAgentsTimeout;
};

template <class T>
struct Serializer<RRef<T>> {
  static void encode(Encoder& encoder, const RRef<T>& value) {
    encode_rref(encoder, value.handle());
  }
  static RRef<T> decode(Decoder& decoder) { return RRef<T>(decode_rref(decoder)); }
};

}  // namespace distrain::rpc
